// SPDX-License-Identifier: GPL-2.0-only
/*
 * Loading a machine from its image, to go on in it in place of this kernel. switch/abi/src/restart.rs
 * describes how.
 *
 * This kernel was booted with `mem=` in a small part of memory, and does not know the rest. Frames whose
 * destination lies in the rest are loaded there at once. A frame whose destination this kernel occupies
 * waits in memory that the image leaves out, or in a destination frame that is all zeros, until this kernel
 * is no longer used. The structures of the landing lie in memory that the image leaves out as well. Nothing
 * is lost before the landing: to close the device is to give up.
 *
 * A machine that is still running elsewhere comes in rounds, and a frame may come again. Its place is the
 * same each time. No frame waits in a frame of zeros then, which may come again as something else.
 */
#include <linux/bsearch.h>
#include <linux/cpu.h>
#include <linux/io.h>
#include <linux/ioport.h>
#include <linux/mm.h>
#include <linux/pci.h>
#include <linux/sched/signal.h>
#include <linux/sizes.h>
#include <linux/sort.h>
#include <linux/uaccess.h>
#include <linux/vmalloc.h>
#include <asm/smp.h>

#include "restore.h"

/* Ranges of memory are checked and sorted by the beginning of both. */
static_assert(offsetof(struct mercury_restart_range, start_phys) ==
	      offsetof(struct mercury_owned_range, start_phys));
static_assert(offsetof(struct mercury_restart_range, pages) == offsetof(struct mercury_owned_range, pages));

#define RANGES_MAX	(SZ_64M / sizeof(struct mercury_restart_range))
#define PCI_CLASS_IOMMU	0x0806
/* Every PC has devices from here to 4 GiB: I/O APICs, timers, local APICs, the firmware. */
#define PC_DEVICES	0xfec00000

struct mercury_restore mercury_restore;
#define restore mercury_restore

static int compare(const void *phys, const void *element)
{
	const struct mercury_window *window = element;
	u64 at = *(const u64 *)phys;

	return at < window->start ? -1 : at >= window->end;
}

/* Returns a page beyond this kernel's memory; NULL if the machine of the image does not have it. */
void *mercury_restore_virt(u64 phys)
{
	const struct mercury_window *window;

	window = __inline_bsearch(&phys, restore.windows, restore.window_count, sizeof(*window),
				  compare);
	return window ? window->virt + (phys - window->start) : NULL;
}

void mercury_restore_end(void)
{
	unsigned int i;

	for (i = 0; i < restore.window_count; i++)
		memunmap(restore.windows[i].virt);
	kvfree(restore.windows);
	kvfree(restore.ranges);
	kvfree(restore.places.plan.numbers);
	kvfree(restore.cpus);
	kvfree(restore.places.loaded);
	kvfree(restore.places.empty);
	kvfree(restore.places.waiting);
	if (restore.root)
		__free_page(restore.root);
	memset(&restore, 0, sizeof(restore));
}

static int read_arrays(const struct mercury_restart_request *request)
{
	size_t ranges = request->ranges_count * sizeof(*restore.ranges);
	size_t cpus = request->cpus_count * sizeof(*restore.cpus);

	if (!request->ranges_count || request->ranges_count > RANGES_MAX || !request->cpus_count ||
	    request->cpus_count > nr_cpu_ids)
		return MERCURY_CODE_BAD_ARGUMENT;
	restore.ranges = kvmalloc(ranges, GFP_KERNEL);
	restore.places.plan.numbers = kvmalloc_array(request->ranges_count, sizeof(u64), GFP_KERNEL);
	restore.cpus = kvmalloc(cpus, GFP_KERNEL);
	restore.windows = kvmalloc_array(2 * (request->ranges_count + MERCURY_OCCUPIED_MAX),
					 sizeof(*restore.windows), GFP_KERNEL);
	if (!restore.ranges || !restore.places.plan.numbers || !restore.cpus || !restore.windows)
		return MERCURY_CODE_NO_MEMORY;
	if (copy_from_user(restore.ranges, u64_to_user_ptr(request->ranges_addr), ranges) ||
	    copy_from_user(restore.cpus, u64_to_user_ptr(request->cpus_addr), cpus))
		return -EFAULT;
	sort(restore.ranges, request->ranges_count, sizeof(*restore.ranges), mercury_frames_by_start, NULL);
	restore.places.plan.ranges = restore.ranges;
	restore.places.plan.range_count = request->ranges_count;
	restore.cpu_count = request->cpus_count;
	restore.resume_virt = request->resume_virt;
	memcpy(restore.resume_phys, request->resume_phys, sizeof(restore.resume_phys));
	restore.places.again = request->flags & MERCURY_RESTART_AGAIN;
	return MERCURY_CODE_OK;
}

static bool is_in_image(phys_addr_t phys)
{
	return PAGE_ALIGNED(phys) && mercury_plan_number(&restore.places.plan, phys) != MERCURY_NO_NUMBER;
}

/* Refuses a place to go on that is not in the image. */
static u32 check_resume(void)
{
	if (!is_in_image(restore.resume_phys[0]) ||
	    (restore.resume_phys[1] && !is_in_image(restore.resume_phys[1])) ||
	    (s64)restore.resume_virt >= 0)
		return MERCURY_CODE_BAD_ARGUMENT;
	return MERCURY_CODE_OK;
}

/* Returns the number of this CPU in the image, or -1. */
int mercury_restore_slot(u32 apic_id)
{
	u32 i;

	for (i = 0; i < restore.cpu_count; i++)
		if (restore.cpus[i].apic_id == apic_id)
			return i;
	return -1;
}

static u32 check_machine(const struct mercury_restart_request *request, struct mercury_outcome *outcome)
{
	u64 modes = mercury_machine_modes();
	int cpu;

	if ((request->flags & ~MERCURY_RESTART_AGAIN) != modes) {
		outcome->detail[0] = request->flags;
		outcome->detail[1] = modes;
		return MERCURY_CODE_RESTORE_MODE;
	}
	outcome->detail[0] = restore.cpu_count;
	outcome->detail[1] = num_online_cpus();
	/* A CPU that is offline waits in text that the landing overwrites. */
	if (restore.cpu_count != num_online_cpus() || num_present_cpus() != num_online_cpus())
		return MERCURY_CODE_RESTORE_CPUS;
	if (restore.cpu_count > MERCURY_LANDING_CPUS_MAX)
		return MERCURY_CODE_RESTORE_CPUS;
	for_each_online_cpu(cpu) {
		if (mercury_restore_slot(per_cpu(x86_cpu_to_apicid, cpu)) >= 0)
			continue;
		outcome->cpu = cpu;
		outcome->detail[0] = per_cpu(x86_cpu_to_apicid, cpu);
		return MERCURY_CODE_RESTORE_CPUS;
	}
	return MERCURY_CODE_OK;
}

/* Returns true if something else than memory is known to be there. */
bool mercury_is_device(phys_addr_t start, phys_addr_t end)
{
	struct pci_dev *device = NULL;
	unsigned int i;

	if (start < SZ_4G && end > PC_DEVICES)
		return true;
	for_each_pci_dev(device)
		for (i = 0; i < PCI_NUM_RESOURCES; i++) {
			const struct resource *bar = &device->resource[i];

			if (resource_type(bar) == IORESOURCE_MEM && bar->parent && resource_size(bar) &&
			    bar->start < end && bar->end >= start) {
				pci_dev_put(device);
				return true;
			}
		}
	return false;
}

static u32 map_window(u64 start, u64 end)
{
	struct mercury_window *window = &restore.windows[restore.window_count];

	if (mercury_is_device(start, end))
		return MERCURY_CODE_RESTORE_OVERLAP;
	window->start = start;
	window->end = end;
	window->virt = memremap(start, end - start, MEMREMAP_WB);
	if (!window->virt)
		return MERCURY_CODE_NO_MEMORY;
	restore.window_count++;
	/* There may be a hundred thousand of them. */
	cond_resched();
	return MERCURY_CODE_OK;
}

/*
 * Devices that no driver has stopped must not write to memory. An IOMMU has no driver here. The kernel of
 * the image needs it before that kernel gives devices their bus mastering back.
 */
void mercury_restore_quiet_devices(void)
{
	struct pci_dev *device = NULL;

	for_each_pci_dev(device)
		if (!device->driver && device->hdr_type == PCI_HEADER_TYPE_NORMAL &&
		    device->class >> 8 != PCI_CLASS_IOMMU)
			pci_clear_master(device);
}

static int occupy(struct resource *ram, void *unused)
{
	return !mercury_plan_occupy(&restore.places.plan, ram->start, ram->end + 1);
}

static int check(const struct mercury_restart_request *request, struct mercury_outcome *outcome)
{
	u32 code = mercury_plan_count(&restore.places.plan, BIT_ULL(boot_cpu_data.x86_phys_bits)) ?:
		   check_resume() ?:
		   check_machine(request, outcome) ?:
		   mercury_plugged_check(restore.ranges, sizeof(*restore.ranges),
					 restore.places.plan.range_count, outcome);

	if (code != MERCURY_CODE_OK)
		return code;
	if (walk_iomem_res_desc(IORES_DESC_NONE, IORESOURCE_SYSTEM_RAM | IORESOURCE_BUSY, 0, -1, NULL,
				occupy))
		return MERCURY_CODE_RESTORE_OVERLAP;
	/* This machine's ordinary kernel leaves no room. */
	outcome->detail[0] = restore.places.plan.occupied_pages;
	outcome->detail[1] = restore.places.plan.page_count;
	return restore.places.plan.occupied_pages < restore.places.plan.page_count ? MERCURY_CODE_OK :
								      MERCURY_CODE_RESTORE_OVERLAP;
}

static int begin(const struct mercury_restart_request *request, struct mercury_outcome *outcome)
{
	int result = read_arrays(request) ?: check(request, outcome);
	size_t words = BITS_TO_LONGS(restore.places.plan.page_count);

	if (result != MERCURY_CODE_OK)
		return result;
	restore.places.loaded = kvcalloc(words, sizeof(long), GFP_KERNEL);
	restore.places.empty = kvcalloc(words, sizeof(long), GFP_KERNEL);
	restore.places.waiting = kvcalloc(restore.places.plan.occupied_pages, sizeof(u64), GFP_KERNEL);
	restore.root = alloc_page(GFP_KERNEL | __GFP_ZERO);
	if (!restore.places.loaded || !restore.places.empty || !restore.places.waiting || !restore.root)
		return MERCURY_CODE_NO_MEMORY;
	mercury_restore_quiet_devices();
	return mercury_plan_windows(&restore.places.plan, map_window) ?:
	       mercury_places_begin(&restore.places);
}

int mercury_restore_begin(const struct mercury_restart_request *request,
			  struct mercury_outcome *outcome)
{
	int result;

	if (mercury.state != MERCURY_STATE_UNLOADED)
		return MERCURY_CODE_ALREADY_LOADED;
	mercury_restore_end();
	cpus_read_lock();
	result = begin(request, outcome);
	cpus_read_unlock();
	if (result != MERCURY_CODE_OK)
		mercury_restore_end();
	return result;
}

static int load_one(const struct mercury_load_entry *entry, void __user **data)
{
	void *page;
	u32 code = mercury_places_load(&restore.places, entry, &page);

	if (code != MERCURY_CODE_OK)
		return code;
	if (page) {
		if (copy_from_user(page, *data, PAGE_SIZE))
			return -EFAULT;
		*data += PAGE_SIZE;
	}
	mercury_places_loaded(&restore.places, entry->frame_phys);
	return MERCURY_CODE_OK;
}

/* Does something with each entry of a request, and with the data that user space has or wants for it. */
static int walk_entries(const struct mercury_load_frames_request *request,
			struct mercury_outcome *outcome,
			int (*act)(const struct mercury_load_entry *entry, void __user **data))
{
	const struct mercury_load_entry __user *entries = u64_to_user_ptr(request->entries_addr);
	void __user *data = u64_to_user_ptr(request->data_addr);
	struct mercury_load_entry entry;
	int result;
	u64 i;

	if (!restore.ranges)
		return MERCURY_CODE_NO_SNAPSHOT;
	for (i = 0; i < request->count; i++) {
		if (copy_from_user(&entry, entries + i, sizeof(entry)))
			return -EFAULT;
		outcome->detail[0] = entry.frame_phys;
		outcome->detail[1] = entry.source;
		result = act(&entry, &data);
		if (result != MERCURY_CODE_OK)
			return result;
		if (fatal_signal_pending(current))
			return -EINTR;
		cond_resched();
	}
	return MERCURY_CODE_OK;
}

int mercury_restore_load(const struct mercury_load_frames_request *request,
			 struct mercury_outcome *outcome)
{
	return walk_entries(request, outcome, load_one);
}

/* Hands a frame back to the process that has loaded it. */
static int read_one(const struct mercury_load_entry *entry, void __user **data)
{
	const void *content = mercury_places_content(&restore.places, entry->frame_phys);

	if (!content)
		return MERCURY_CODE_RESTORE_FRAME;
	if (copy_to_user(*data, content, PAGE_SIZE))
		return -EFAULT;
	*data += PAGE_SIZE;
	return MERCURY_CODE_OK;
}

int mercury_restore_read(const struct mercury_load_frames_request *request,
			 struct mercury_outcome *outcome)
{
	return walk_entries(request, outcome, read_one);
}
