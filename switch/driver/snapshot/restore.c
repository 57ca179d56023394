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

#define RANGES_MAX	(SZ_64M / sizeof(struct mercury_restart_range))
#define PCI_CLASS_IOMMU	0x0806
/* Every PC has devices from here to 4 GiB: I/O APICs, timers, local APICs, the firmware. */
#define PC_DEVICES	0xfec00000

struct mercury_restore mercury_restore;
#define restore mercury_restore

static int by_start(const void *left, const void *right)
{
	const u64 *a = left, *b = right;

	return *a < *b ? -1 : *a > *b;
}

static int compare(const void *phys, const void *element)
{
	const struct mercury_window *window = element;
	u64 at = *(const u64 *)phys;

	return at < window->start ? -1 : at >= window->end;
}

/* Returns a page beyond this kernel's memory; NULL if the machine of the image does not have it. */
void *mercury_restore_virt(phys_addr_t phys)
{
	const struct mercury_window *window;

	window = __inline_bsearch(&phys, restore.windows, restore.window_count, sizeof(*window),
				  compare);
	return window ? window->virt + (phys - window->start) : NULL;
}

/* Returns a page that was set aside; 0 if there is none left. */
phys_addr_t mercury_restore_reserved(void)
{
	phys_addr_t phys = restore.reserve;

	if (phys)
		restore.reserve = *(u64 *)mercury_restore_virt(phys);
	return phys;
}

/* Sets pages aside for the landing: no frame waits in one, and none is a destination. */
static u32 set_aside(void)
{
	u64 pages = mercury_plan_aside(&restore.plan);

	if (restore.again && !mercury_plan_has_room(&restore.plan, pages))
		return MERCURY_CODE_RESTORE_ROOM;
	while (pages--) {
		phys_addr_t phys = mercury_plan_unused_page(&restore.plan);

		if (!phys)
			return MERCURY_CODE_RESTORE_ROOM;
		*(u64 *)mercury_restore_virt(phys) = restore.reserve;
		restore.reserve = phys;
	}
	return MERCURY_CODE_OK;
}

/* Lists a copy for the landing; returns false if there is no room. */
static bool add_copy(struct mercury_copies *copies, phys_addr_t destination, phys_addr_t from)
{
	u64 *entry;

	if (!copies->virt || copies->virt->count == MERCURY_LANDING_LIST_MAX) {
		phys_addr_t phys = mercury_restore_reserved();

		if (!phys)
			return false;
		copies->virt = mercury_restore_virt(phys);
		copies->virt->next_phys = copies->first;
		copies->virt->count = 0;
		copies->first = phys;
	}
	entry = &copies->virt->copies[2 * copies->virt->count++];
	entry[0] = destination;
	entry[1] = from;
	return true;
}

/* Returns a page in which a frame can wait until the landing; 0 if there is none left. */
static phys_addr_t waiting_page(void)
{
	phys_addr_t phys = mercury_plan_unused_page(&restore.plan);

	if (phys || restore.again || !restore.zero_frames)
		return phys;
	phys = restore.zero_frames;
	restore.zero_frames = *(u64 *)mercury_restore_virt(phys);
	/* It becomes zeros again after all copies. */
	return add_copy(&restore.zeros, phys, 0) ? phys : 0;
}

void mercury_restore_end(void)
{
	unsigned int i;

	for (i = 0; i < restore.window_count; i++)
		memunmap(restore.windows[i].virt);
	kvfree(restore.windows);
	kvfree(restore.ranges);
	kvfree(restore.plan.numbers);
	kvfree(restore.cpus);
	kvfree(restore.loaded);
	kvfree(restore.waiting);
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
	restore.plan.numbers = kvmalloc_array(request->ranges_count, sizeof(u64), GFP_KERNEL);
	restore.cpus = kvmalloc(cpus, GFP_KERNEL);
	restore.windows = kvmalloc_array(2 * (request->ranges_count + MERCURY_OCCUPIED_MAX),
					 sizeof(*restore.windows), GFP_KERNEL);
	if (!restore.ranges || !restore.plan.numbers || !restore.cpus || !restore.windows)
		return MERCURY_CODE_NO_MEMORY;
	if (copy_from_user(restore.ranges, u64_to_user_ptr(request->ranges_addr), ranges) ||
	    copy_from_user(restore.cpus, u64_to_user_ptr(request->cpus_addr), cpus))
		return -EFAULT;
	sort(restore.ranges, request->ranges_count, sizeof(*restore.ranges), by_start, NULL);
	restore.plan.ranges = restore.ranges;
	restore.plan.range_count = request->ranges_count;
	restore.cpu_count = request->cpus_count;
	restore.resume_virt = request->resume_virt;
	restore.resume_phys[0] = request->resume_phys[0];
	restore.resume_phys[1] = request->resume_phys[1];
	restore.again = request->flags & MERCURY_RESTART_AGAIN;
	return MERCURY_CODE_OK;
}

static bool is_in_image(phys_addr_t phys)
{
	return PAGE_ALIGNED(phys) && mercury_plan_number(&restore.plan, phys) != MERCURY_NO_NUMBER;
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
	if (sizeof(struct mercury_landing) + restore.cpu_count * sizeof(u64) > PAGE_SIZE)
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

/*
 * Refuses ranges of memory that this machine does not have: memory that was plugged in must be in its slot.
 */
static u32 check_memory(struct mercury_outcome *outcome)
{
	struct mercury_plugged *plugged = mercury_plugged_find();
	u32 code = MERCURY_CODE_OK, i;

	if (!plugged)
		return MERCURY_CODE_NO_MEMORY;
	for (i = 0; code == MERCURY_CODE_OK && i < restore.plan.range_count; i++)
		code = mercury_plugged_check(plugged, restore.ranges[i].start_phys, restore.ranges[i].pages,
					     outcome);
	mercury_plugged_free(plugged);
	return code;
}

/* Returns true if something else than memory is known to be there. */
static bool is_device(phys_addr_t start, phys_addr_t end)
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

	if (is_device(start, end))
		return MERCURY_CODE_RESTORE_OVERLAP;
	window->start = start;
	window->end = end;
	window->virt = memremap(start, end - start, MEMREMAP_WB);
	if (!window->virt)
		return MERCURY_CODE_NO_MEMORY;
	restore.window_count++;
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
	return !mercury_plan_occupy(&restore.plan, ram->start, ram->end + 1);
}

static int check(const struct mercury_restart_request *request, struct mercury_outcome *outcome)
{
	u32 code = mercury_plan_count(&restore.plan, BIT_ULL(boot_cpu_data.x86_phys_bits)) ?:
		   check_resume() ?:
		   check_machine(request, outcome) ?:
		   check_memory(outcome);

	if (code != MERCURY_CODE_OK)
		return code;
	if (walk_iomem_res_desc(IORES_DESC_NONE, IORESOURCE_SYSTEM_RAM | IORESOURCE_BUSY, 0, -1, NULL,
				occupy))
		return MERCURY_CODE_RESTORE_OVERLAP;
	/* This machine's ordinary kernel leaves no room. */
	outcome->detail[0] = restore.plan.occupied_pages;
	outcome->detail[1] = restore.plan.page_count;
	return restore.plan.occupied_pages < restore.plan.page_count ? MERCURY_CODE_OK :
								      MERCURY_CODE_RESTORE_OVERLAP;
}

static int begin(const struct mercury_restart_request *request, struct mercury_outcome *outcome)
{
	int result = read_arrays(request) ?: check(request, outcome);

	if (result != MERCURY_CODE_OK)
		return result;
	restore.loaded = kvcalloc(BITS_TO_LONGS(restore.plan.page_count), sizeof(long), GFP_KERNEL);
	restore.waiting = kvcalloc(restore.plan.occupied_pages, sizeof(u64), GFP_KERNEL);
	restore.root = alloc_page(GFP_KERNEL | __GFP_ZERO);
	if (!restore.loaded || !restore.waiting || !restore.root)
		return MERCURY_CODE_NO_MEMORY;
	mercury_restore_quiet_devices();
	return mercury_plan_windows(&restore.plan, map_window) ?: set_aside();
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

/*
 * Returns the content of a frame that has been loaded; NULL if it has not, or is all zeros and waits
 * nowhere.
 */
void *mercury_restore_content(phys_addr_t phys)
{
	u64 number = PAGE_ALIGNED(phys) ? mercury_plan_number(&restore.plan, phys) : MERCURY_NO_NUMBER;
	u64 occupied = mercury_plan_occupied_number(&restore.plan, phys);

	if (number == MERCURY_NO_NUMBER || !test_bit(number, restore.loaded))
		return NULL;
	if (occupied == MERCURY_NO_NUMBER)
		return mercury_restore_virt(phys);
	return restore.waiting[occupied] ? mercury_restore_virt(restore.waiting[occupied]) : NULL;
}

/* Loads a frame of zeros that does not come again: other frames may wait in it. */
static u32 load_zero(phys_addr_t destination)
{
	void *virt = mercury_restore_virt(destination);

	if (!virt)
		return add_copy(&restore.zeros, destination, 0) ? MERCURY_CODE_OK : MERCURY_CODE_RESTORE_ROOM;
	memset(virt, 0, PAGE_SIZE);
	*(u64 *)virt = restore.zero_frames;
	restore.zero_frames = destination;
	return MERCURY_CODE_OK;
}

/* Returns the page for a frame's content, which is the same each time; NULL if there is no room. */
static void *place_for(phys_addr_t destination)
{
	u64 occupied = mercury_plan_occupied_number(&restore.plan, destination);
	phys_addr_t waiting;

	if (occupied == MERCURY_NO_NUMBER)
		return mercury_restore_virt(destination);
	if (restore.waiting[occupied])
		return mercury_restore_virt(restore.waiting[occupied]);
	waiting = waiting_page();
	if (!waiting || !add_copy(&restore.copies, destination, waiting))
		return NULL;
	restore.waiting[occupied] = waiting;
	return mercury_restore_virt(waiting);
}

/*
 * Fills the page of a frame: with zeros, with the content of another frame, or with the next page of data.
 */
static int fill(const struct mercury_load_entry *entry, void __user **data)
{
	const void *twin = NULL;
	void *place;

	if (entry->source != MERCURY_LOAD_DATA && entry->source != MERCURY_LOAD_ZERO) {
		twin = mercury_restore_content(entry->source);
		if (!twin)
			return MERCURY_CODE_RESTORE_FRAME;
	}
	place = place_for(entry->frame_phys);
	if (!place)
		return MERCURY_CODE_RESTORE_ROOM;
	if (twin) {
		memcpy(place, twin, PAGE_SIZE);
	} else if (entry->source == MERCURY_LOAD_ZERO) {
		memset(place, 0, PAGE_SIZE);
	} else {
		if (copy_from_user(place, *data, PAGE_SIZE))
			return -EFAULT;
		*data += PAGE_SIZE;
	}
	return MERCURY_CODE_OK;
}

static int load_one(const struct mercury_load_entry *entry, void __user **data)
{
	u64 number = MERCURY_NO_NUMBER;
	int result;

	if (PAGE_ALIGNED(entry->frame_phys))
		number = mercury_plan_number(&restore.plan, entry->frame_phys);
	if (number == MERCURY_NO_NUMBER || (test_bit(number, restore.loaded) && !restore.again))
		return MERCURY_CODE_RESTORE_FRAME;
	if (entry->source == MERCURY_LOAD_ZERO && !restore.again)
		result = load_zero(entry->frame_phys);
	else
		result = fill(entry, data);
	if (result == MERCURY_CODE_OK && !__test_and_set_bit(number, restore.loaded))
		restore.loaded_count++;
	return result;
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
	const void *content = mercury_restore_content(entry->frame_phys);

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
