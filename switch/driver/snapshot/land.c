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
#include <asm/debugreg.h>
#include <asm/io.h>
#include <asm/kvm_para.h>
#include <asm/smp.h>
#include <asm/special_insns.h>

#include "restore.h"

#define TABLE_FLAGS	(_PAGE_PRESENT | _PAGE_RW | _PAGE_ACCESSED)
#define LEAF_FLAGS	(TABLE_FLAGS | _PAGE_DIRTY)
/* DR7 with every breakpoint disabled; bit 10 reads as 1. */
#define DR7_DISARMED	0x400

#define restore mercury_restore

/* The first CPU suspends the kernel's core for all of them. */
enum core { CORE_RUNS, CORE_SUSPENDED, CORE_REFUSED };
static enum core core;
static int first_cpu;

/* Returns the table below an entry, made if there is none; NULL if there is no room. */
static u64 *table_below(u64 *entry)
{
	if (!*entry) {
		phys_addr_t phys = mercury_restore_reserved();

		if (!phys)
			return NULL;
		memset(mercury_restore_virt(phys), 0, PAGE_SIZE);
		*entry = phys | TABLE_FLAGS;
	}
	return mercury_restore_virt(*entry & PHYSICAL_PAGE_MASK);
}

/* Maps one page of 1 << `size` bytes in the tables of the landing. */
static u32 map(u64 *table, u64 virt, phys_addr_t phys, int size)
{
	int shift = native_read_cr4() & X86_CR4_LA57 ? 48 : 39;

	for (; table && shift > size; shift -= 9)
		table = table_below(table + ((virt >> shift) & 511));
	if (!table)
		return MERCURY_CODE_RESTORE_ROOM;
	table[(virt >> size) & 511] = phys | LEAF_FLAGS | (size > PAGE_SHIFT ? _PAGE_PSE : 0);
	return MERCURY_CODE_OK;
}

/*
 * Maps the image's memory at its physical address, and not a page more: its neighbours may be broken, or the
 * firmware's, and must not be read even by speculation. Maps the text at which the CPUs go on at its own
 * address as well.
 */
static u32 map_landing(u64 *root)
{
	u64 text = restore.resume_virt & PAGE_MASK;
	u32 code = MERCURY_CODE_OK, i = 0;

	while (code == MERCURY_CODE_OK && i < restore.plan.range_count) {
		phys_addr_t phys = restore.ranges[i].start_phys;
		phys_addr_t end = mercury_plan_stretch_end(&restore.plan, &i);

		while (code == MERCURY_CODE_OK && phys < end) {
			bool large = IS_ALIGNED(phys, PMD_SIZE) && end - phys >= PMD_SIZE;

			code = map(root, phys, phys, large ? PMD_SHIFT : PAGE_SHIFT);
			phys += large ? PMD_SIZE : PAGE_SIZE;
		}
	}
	for (i = 0; code == MERCURY_CODE_OK && i < 2; i++)
		if (restore.resume_phys[i])
			code = map(root, text + i * PAGE_SIZE, restore.resume_phys[i], PAGE_SHIFT);
	return code;
}

/* Gives the other kernel random bytes of this one. */
static u32 give_seeds(void)
{
	u32 i;

	for (i = 0; i < restore.cpu_count; i++) {
		phys_addr_t phys = restore.cpus[i].saved_phys;
		struct mercury_saved_cpu *saved = mercury_restore_content(phys & PAGE_MASK);

		if (!saved || offset_in_page(phys) > PAGE_SIZE - sizeof(*saved))
			return MERCURY_CODE_RESTORE_FRAME;
		saved = (void *)saved + offset_in_page(phys);
		get_random_bytes(saved->seed, sizeof(saved->seed));
	}
	return MERCURY_CODE_OK;
}

/* Has frames of zeros hold zeros again, from the links between them on. Nothing waits in one after this. */
static void clear_zero_frames(void)
{
	while (restore.zero_frames) {
		u64 *virt = mercury_restore_virt(restore.zero_frames);

		restore.zero_frames = *virt;
		*virt = 0;
	}
}

/* Returns the first list of the landing: all copies, and then all zeros, in which frames may wait. */
static phys_addr_t join_lists(void)
{
	struct mercury_landing_list *last;

	if (!restore.copies.first)
		return restore.zeros.first;
	last = mercury_restore_virt(restore.copies.first);
	while (last->next_phys)
		last = mercury_restore_virt(last->next_phys);
	last->next_phys = restore.zeros.first;
	return restore.copies.first;
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
	landing->list_phys = join_lists();
}

/* Puts all that the landing needs into pages to which nothing is copied. */
static u32 prepare(void)
{
	u64 *root, *kernel = page_address(restore.root);
	phys_addr_t root_phys;
	u32 code;

	restore.landing = mercury_restore_reserved();
	restore.code = mercury_restore_reserved();
	root_phys = mercury_restore_reserved();
	if (!restore.landing || !restore.code || !root_phys)
		return MERCURY_CODE_RESTORE_ROOM;
	root = mercury_restore_virt(root_phys);
	memset(root, 0, PAGE_SIZE);
	code = map_landing(root);
	if (code != MERCURY_CODE_OK)
		return code;

	/* The tables to leave with: this kernel's, with the landing's in the lower half. */
	memcpy(kernel, __va(read_cr3_pa()), PAGE_SIZE);
	memcpy(kernel, root, PAGE_SIZE / 2);
	memcpy(mercury_restore_virt(restore.code), mercury_landing, mercury_landing_end - mercury_landing);
	clear_zero_frames();
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
	if (restore.loaded_count != restore.plan.page_count)
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
