// SPDX-License-Identifier: GPL-2.0-only
/*
 * Fault injection: one armed point at a time, which fires once. Points of the driver fire here; those
 * of the hypervisor are handed to it, in the gate block of a native CPU or by a hypercall. Builds
 * without FAULTS have none of this.
 */
#include <linux/cpu.h>
#include <linux/smp.h>

#include "attach.h"

/* The first point of the hypervisor. */
#define HYPERVISOR_POINTS	MERCURY_FAULT_POINT_ENTRY

static struct mercury_fault_arm armed;
static u32 armed_cpu;
static atomic_t passages, fired;
/* Points that have fired in the hypervisor, as far as native CPUs could tell. */
static u64 hypervisor_fired;

static bool armed_here(u32 point)
{
	return READ_ONCE(armed.point) == point &&
	       (armed_cpu == MERCURY_NO_CPU || armed_cpu == raw_smp_processor_id());
}

/* Returns true if the driver must fail at this point now. In any context. */
bool mercury_fault(u32 point)
{
	if (!armed_here(point) || atomic_dec_return(&passages) != 0)
		return false;
	WRITE_ONCE(armed.point, MERCURY_FAULT_POINT_NONE);
	atomic_inc(&fired);
	return true;
}

/* Alters one word of this CPU's facts until the point fires. */
void mercury_fault_facts(struct mercury_cpu_facts *facts)
{
	if (armed_here(MERCURY_FAULT_POINT_FACTS) && atomic_read(&passages) == 1)
		*(u32 *)((void *)facts + armed.offset) = armed.value;
}

/* Hands the armed point to the hypervisor on this CPU. */
static u32 arm_cpu(struct mercury_cpu *m)
{
	struct mercury_fault_arm arm = armed;
	u64 unused;

	if (arm.point < HYPERVISOR_POINTS ||
	    (armed_cpu != MERCURY_NO_CPU && armed_cpu != smp_processor_id()))
		arm = (struct mercury_fault_arm){};
	if (mercury_mode() == MERCURY_MODE_ATTACHED)
		return mercury_hypercall(MERCURY_HYPERCALL_ARM_FAULT, arm.point, arm.passage,
					 &unused);
	m->gate->fault = arm;
	return MERCURY_CODE_OK;
}

static u32 count_cpu(struct mercury_cpu *m)
{
	m->detail[0] = 0;
	if (mercury_mode() == MERCURY_MODE_NATIVE)
		m->detail[0] = m->gate->fault_fired;
	return MERCURY_CODE_OK;
}

/* The points of the hypervisor give the offset other meanings. */
static bool is_word_of_facts(const struct mercury_fault_request *request)
{
	return request->point >= HYPERVISOR_POINTS ||
	       (request->offset % sizeof(u32) == 0 &&
		request->offset <= sizeof(struct mercury_cpu_facts) - sizeof(u32));
}

/* Arms a point and disarms the one before; under mercury.lock. */
u32 mercury_fault_arm(const struct mercury_fault_request *request)
{
	if (request->reserved || !is_word_of_facts(request) ||
	    (request->point && !request->passage) || request->passage > INT_MAX ||
	    (request->cpu != MERCURY_NO_CPU && request->cpu >= nr_cpu_ids))
		return MERCURY_CODE_BAD_ARGUMENT;
	if (request->point >= HYPERVISOR_POINTS && mercury.state == MERCURY_STATE_UNLOADED)
		return MERCURY_CODE_NOT_LOADED;
	WRITE_ONCE(armed.point, MERCURY_FAULT_POINT_NONE);
	atomic_set(&passages, request->passage);
	armed_cpu = request->cpu;
	armed.passage = request->passage;
	armed.offset = request->offset;
	armed.value = request->value;
	WRITE_ONCE(armed.point, request->point);
	if (mercury.state == MERCURY_STATE_UNLOADED)
		return MERCURY_CODE_OK;
	cpus_read_lock();
	mercury_on_cpus(cpu_online_mask, arm_cpu);
	cpus_read_unlock();
	return MERCURY_CODE_OK;
}

/* Returns how often points have fired since load; in the hypervisor, as far as native CPUs know. */
u32 mercury_fault_fired(void)
{
	int cpu;

	if (mercury.state == MERCURY_STATE_UNLOADED)
		return atomic_read(&fired);
	cpus_read_lock();
	mercury_on_cpus(cpu_online_mask, count_cpu);
	hypervisor_fired = 0;
	for_each_online_cpu(cpu)
		hypervisor_fired += mercury_cpu(cpu)->detail[0];
	cpus_read_unlock();
	return atomic_read(&fired) + hypervisor_fired;
}

void mercury_fault_reset(void)
{
	WRITE_ONCE(armed.point, MERCURY_FAULT_POINT_NONE);
	atomic_set(&fired, 0);
}
