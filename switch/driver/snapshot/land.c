// SPDX-License-Identifier: GPL-2.0-only
/*
 * The landing: all CPUs leave this kernel for code that copies the frames that wait to their destinations,
 * and go on in the machine of the image. Once the first CPU is there, nothing of this kernel is left.
 */
#define pr_fmt(fmt) "mercury: " fmt

#include <linux/cpu.h>
#include <linux/mm.h>
#include <linux/random.h>
#include <linux/stop_machine.h>
#include <linux/suspend.h>
#include <linux/syscore_ops.h>
#include <asm/io.h>
#include <asm/kvm_para.h>
#include <asm/smp.h>
#include <asm/special_insns.h>

#include "../attach/switch.h"
#include "restore.h"

#define restore mercury_restore

/* The first CPU suspends the kernel's core for all of them. */
enum core { CORE_RUNS, CORE_SUSPENDED, CORE_REFUSED };
static enum core core;
static int first_cpu;

/* Gives the other kernel random bytes of this one. */
static u32 give_seeds(void)
{
	u32 i;

	for (i = 0; i < restore.cpu_count; i++) {
		phys_addr_t phys = restore.cpus[i].saved_phys;
		struct mercury_saved_cpu *saved = mercury_places_content(&restore.places, phys & PAGE_MASK);

		if (!saved || offset_in_page(phys) > PAGE_SIZE - sizeof(*saved))
			return MERCURY_CODE_RESTORE_FRAME;
		saved = (void *)saved + offset_in_page(phys);
		get_random_bytes(saved->seed, sizeof(saved->seed));
	}
	return MERCURY_CODE_OK;
}

/* Fills the landing's page: the structure, and after it the CPUs. */
static void fill_landing(phys_addr_t root_phys)
{
	struct mercury_landing *landing = mercury_restore_virt(restore.landing);
	u64 *cpus = (u64 *)(landing + 1);
	u32 i;

	memset(landing, 0, PAGE_SIZE);
	for (i = 0; i < restore.cpu_count; i++)
		cpus[i] = restore.cpus[i].saved_phys;
	landing->root_phys = root_phys;
	landing->cpus_phys = restore.landing + sizeof(*landing);
	landing->resume_virt = restore.resume_virt;
	landing->cpus = restore.cpu_count;
	landing->list_phys = mercury_places_finish(&restore.places);
}

/* Puts all that the landing needs into pages to which nothing is copied. */
static u32 prepare(void)
{
	u64 *root, *kernel = page_address(restore.root);
	phys_addr_t root_phys;
	u32 code;

	restore.landing = mercury_places_reserved(&restore.places);
	restore.code = mercury_places_reserved(&restore.places);
	root_phys = mercury_places_reserved(&restore.places);
	if (!restore.landing || !restore.code || !root_phys)
		return MERCURY_CODE_RESTORE_ROOM;
	root = mercury_restore_virt(root_phys);
	memset(root, 0, PAGE_SIZE);
	code = mercury_places_map(&restore.places, root, native_read_cr4() & X86_CR4_LA57 ? 48 : 39,
				  restore.resume_virt, restore.resume_phys);
	if (code != MERCURY_CODE_OK)
		return code;

	/* The tables to leave with: this kernel's, with the landing's in the lower half. */
	memcpy(kernel, __va(read_cr3_pa()), PAGE_SIZE);
	memcpy(kernel, root, PAGE_SIZE / 2);
	memcpy(mercury_restore_virt(restore.code), mercury_landing, mercury_landing_end - mercury_landing);
	fill_landing(root_phys);
	return MERCURY_CODE_OK;
}

/* Stops KVM beneath this kernel from writing to addresses of this kernel. */
static void stop_paravirtualization(void)
{
	static const u32 msrs[] = { MSR_KVM_STEAL_TIME, MSR_KVM_ASYNC_PF_EN, MSR_KVM_PV_EOI_EN,
				    MSR_KVM_SYSTEM_TIME_NEW };
	unsigned int i;

	for (i = 0; boot_cpu_has(X86_FEATURE_HYPERVISOR) && i < ARRAY_SIZE(msrs); i++)
		wrmsrl_safe(msrs[i], 0);
}

/* On each CPU, with interrupts off. Returns only if the kernel refuses to suspend its core. */
static int land(void *unused)
{
	int slot = mercury_restore_slot(per_cpu(x86_cpu_to_apicid, smp_processor_id()));

	if (smp_processor_id() == first_cpu)
		WRITE_ONCE(core, syscore_suspend() ? CORE_REFUSED : CORE_SUSPENDED);
	while (READ_ONCE(core) == CORE_RUNS)
		cpu_relax();
	if (core == CORE_REFUSED)
		return -EBUSY;
	native_set_debugreg(7, DR7_DISARMED);
	stop_paravirtualization();
	mercury_land(page_to_phys(restore.root), restore.code, restore.landing, slot);
	return 0;
}

/* With tasks frozen and devices still. */
static int leave(void *unused)
{
	int cpu, err;

	if (num_online_cpus() != restore.cpu_count)
		return -EBUSY;
	for_each_online_cpu(cpu)
		if (mercury_restore_slot(per_cpu(x86_cpu_to_apicid, cpu)) < 0)
			return -EBUSY;
	mercury_restore_quiet_devices();
	/* A network card that does not stop would receive into the memory of the image. */
	err = mercury_dma_stop();
	if (err)
		return err;
	first_cpu = cpumask_first(cpu_online_mask);
	core = CORE_RUNS;
	err = stop_machine(land, NULL, cpu_online_mask);
	mercury_dma_start(false);
	return err;
}

/* Goes on in the machine of the image. Returns only if that fails. */
int mercury_restore_go(void)
{
	u32 code;

	if (!restore.ranges)
		return MERCURY_CODE_NO_SNAPSHOT;
	if (mercury.state != MERCURY_STATE_UNLOADED)
		return MERCURY_CODE_ALREADY_LOADED;
	if (restore.places.loaded_count != restore.places.plan.page_count)
		return MERCURY_CODE_RESTORE_INCOMPLETE;
	/* A second try would use up what is set aside. */
	if (restore.landing)
		return MERCURY_CODE_RESTORE_QUIESCE;
	code = give_seeds() ?: prepare();
	if (code != MERCURY_CODE_OK)
		return code;
	pr_info("going on in the machine of the image\n");
	WRITE_ONCE(mercury.waits_for_sleep, true);
	hibernate_quiet_exec(leave, NULL);
	WRITE_ONCE(mercury.waits_for_sleep, false);
	return MERCURY_CODE_RESTORE_QUIESCE;
}
