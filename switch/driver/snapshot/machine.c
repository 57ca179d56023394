// SPDX-License-Identifier: GPL-2.0-only
/* The description of the machine that an image holds besides the content of memory. */
#include <linux/mm.h>
#include <linux/percpu.h>
#include <linux/uaccess.h>
#include <linux/vmalloc.h>
#include <asm/io.h>
#include <asm/smp.h>
#include <asm/special_insns.h>

#include "snapshot.h"

/* Describes a CPU: how its APIC is addressed, and where it goes on. */
void mercury_machine_cpu(int cpu, struct mercury_restart_cpu *entry)
{
	entry->cpu = cpu;
	entry->apic_id = per_cpu(x86_cpu_to_apicid, cpu);
	entry->saved_phys = virt_to_phys(mercury_state_of(cpu));
}

/* Hands the CPUs of the snapshot to user space, as far as there is room. */
static int put_cpus(struct mercury_restart_request *request, u32 room)
{
	struct mercury_restart_cpu __user *cpus = u64_to_user_ptr(request->cpus_addr);
	int cpu;

	request->cpus_count = 0;
	for_each_cpu(cpu, mercury_instant_cpus()) {
		struct mercury_restart_cpu entry = {};

		mercury_machine_cpu(cpu, &entry);
		if (request->cpus_count < room &&
		    copy_to_user(cpus + request->cpus_count, &entry, sizeof(entry)))
			return -EFAULT;
		request->cpus_count++;
	}
	return 0;
}

static int put_range(struct mercury_restart_request *request, u32 room,
		     const struct mercury_owned_range *range, u64 kind)
{
	struct mercury_restart_range __user *ranges = u64_to_user_ptr(request->ranges_addr);
	struct mercury_restart_range entry = {
		.start_phys = range->start_phys,
		.pages = range->pages,
		.kind = kind,
	};

	if (request->ranges_count < room &&
	    copy_to_user(ranges + request->ranges_count, &entry, sizeof(entry)))
		return -EFAULT;
	request->ranges_count++;
	return 0;
}

/* Hands over the ranges that the image holds, and those of this machine's memory that it can do without. */
static int put_ranges(struct mercury_restart_request *request, u32 room)
{
	const struct mercury_kept *kept = mercury_kept();
	struct mercury_owned_range range;
	unsigned int i;
	bool is_pool;
	int err = 0;

	request->ranges_count = 0;
	for (i = 0; !err && i < kept->count; i++)
		err = put_range(request, room, &kept->ranges[i], MERCURY_RANGE_KEPT);
	for (i = 0; !err && mercury_piece_range(i, &range, &is_pool); i++)
		err = put_range(request, room, &range, MERCURY_RANGE_FREE);
	for (i = 0; !err && mercury_owned(i, &range); i++)
		err = put_range(request, room, &range, MERCURY_RANGE_FREE);
	return err;
}

/* Returns the modes of this machine that the machine in which it goes on must have too. */
u64 mercury_machine_modes(void)
{
	u64 flags = 0;

	if (native_read_cr4() & X86_CR4_LA57)
		flags |= MERCURY_RESTART_FIVE_LEVEL;
	if (mercury_x2apic())
		flags |= MERCURY_RESTART_X2APIC;
	return flags;
}

/* Describes the machine, once a snapshot has been prepared. */
int mercury_machine_describe(struct mercury_restart_request *request, struct mercury_outcome *outcome)
{
	unsigned long text = (unsigned long)mercury_resume & PAGE_MASK;
	const struct mercury_kept *kept = mercury_kept();
	struct page *next;
	u32 code;
	int err;

	/*
	 * All of the machine's memory must be there in the restore environment. No machine is restored from
	 * a kept snapshot.
	 */
	code = mercury_plugged_check(kept->ranges, sizeof(*kept->ranges), kept->count, outcome);
	if (code != MERCURY_CODE_OK && !mercury_snapshot_is_kept())
		return code;
	request->flags = mercury_machine_modes();
	request->resume_virt = (u64)mercury_resume;
	request->resume_phys[0] = PFN_PHYS(vmalloc_to_pfn((void *)text));
	next = vmalloc_to_page((void *)text + PAGE_SIZE);
	request->resume_phys[1] = next ? page_to_phys(next) : 0;
	err = put_cpus(request, request->cpus_count);
	return err ? err : put_ranges(request, request->ranges_count);
}
