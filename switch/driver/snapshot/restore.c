// SPDX-License-Identifier: GPL-2.0-only
/*
 * Bringing a machine back from its image, in place of this one. switch/abi/src/restart.rs says how.
 *
 * This kernel is small: it was booted with `mem=`, and knows of the rest of memory nothing. There each
 * frame of the image goes home at once. A frame whose home this kernel occupies waits in memory that
 * the image leaves out, or at the home of a frame that is all zeros, until nobody uses this kernel any
 * more. All that the landing needs lies there too. Nothing is lost before the landing: to give up is to
 * close the device.
 *
 * A machine that comes while it still runs elsewhere comes in rounds, and a frame may come again. Then it
 * has one place from the first time on, and none waits at the home of zeros, which may be something else
 * later.
 */
#define pr_fmt(fmt) "mercury: " fmt

#include <linux/cpu.h>
#include <linux/io.h>
#include <linux/ioport.h>
#include <linux/mm.h>
#include <linux/pci.h>
#include <linux/random.h>
#include <linux/sched/signal.h>
#include <linux/sizes.h>
#include <linux/slab.h>
#include <linux/sort.h>
#include <linux/stop_machine.h>
#include <linux/suspend.h>
#include <linux/syscore_ops.h>
#include <linux/uaccess.h>
#include <linux/vmalloc.h>
#include <asm/debugreg.h>
#include <asm/kvm_para.h>
#include <asm/smp.h>
#include <asm/special_insns.h>

#include "snapshot.h"

#define RANGES_MAX	(SZ_64M / sizeof(struct mercury_restart_range))
#define OCCUPIED_MAX	64
#define TABLE_FLAGS	(_PAGE_PRESENT | _PAGE_RW | _PAGE_ACCESSED)
#define LEAF_FLAGS	(TABLE_FLAGS | _PAGE_DIRTY)

struct stretch {
	phys_addr_t start, end;
	/* Pages of the stretches before it. */
	u64 before;
};

/* Memory beyond this kernel's, mapped. */
struct window {
	struct stretch range;
	void *virt;
};

/* Pages of copies, the newest first. */
struct list {
	phys_addr_t first;
	struct mercury_landing_list *virt;
};

static struct {
	/* Of the image, ascending; for those that it holds, the number of their first page. */
	struct mercury_restart_range *ranges;
	u64 *numbers;
	u32 range_count;
	struct mercury_restart_cpu *cpus;
	u32 cpu_count;
	u64 resume_virt, resume_phys[2];
	/* Frames may come again. */
	bool again;
	/* What this kernel occupies, ascending; and how many pages that are. */
	struct stretch occupied[OCCUPIED_MAX];
	unsigned int occupied_count;
	u64 occupied_pages;
	struct window *windows;
	unsigned int window_count;
	/* Which pages of the image are there. */
	unsigned long *loaded;
	u64 page_count, loaded_count;
	/* Where frames wait, by the number of the page among those that this kernel occupies. */
	u64 *waiting;
	/* The next page that the image leaves out. */
	u32 free_range;
	u64 free_page;
	/* Homes of zeros, each with the address of the next in it. */
	phys_addr_t zero_homes;
	/* Pages that are set aside for the landing, likewise: they must be nobody's home. */
	phys_addr_t reserve;
	struct list copies, zeros;
	phys_addr_t top;
	struct page *root;
	phys_addr_t landing, code;
	/* 0 while the first CPU stops what is the kernel's own, then 1, or 2 if it could not. */
	int ready;
	int first_cpu;
} restore;

static int by_start(const void *left, const void *right)
{
	const u64 *a = left, *b = right;

	return *a < *b ? -1 : *a > *b;
}

/* The number of a page among those that this kernel occupies, or U64_MAX. */
static u64 occupied_number(phys_addr_t phys)
{
	unsigned int i;

	for (i = 0; i < restore.occupied_count; i++) {
		const struct stretch *stretch = &restore.occupied[i];

		if (phys >= stretch->start && phys < stretch->end)
			return stretch->before + PHYS_PFN(phys - stretch->start);
	}
	return U64_MAX;
}

static bool is_occupied(phys_addr_t phys)
{
	return occupied_number(phys) != U64_MAX;
}

/* A page beyond this kernel's memory; NULL if it is none of the image's machine. */
static void *virt_of(phys_addr_t phys)
{
	unsigned int low = 0, high = restore.window_count;

	while (low < high) {
		unsigned int middle = (low + high) / 2;
		const struct window *window = &restore.windows[middle];

		if (phys < window->range.start)
			high = middle;
		else if (phys >= window->range.end)
			low = middle + 1;
		else
			return window->virt + (phys - window->range.start);
	}
	return NULL;
}

/* A page that the image leaves out and this kernel does not occupy; 0 if there is none left. */
static phys_addr_t unused_page(void)
{
	for (; restore.free_range < restore.range_count; restore.free_range++, restore.free_page = 0) {
		const struct mercury_restart_range *range = &restore.ranges[restore.free_range];

		if (range->kind != MERCURY_RANGE_FREE)
			continue;
		while (restore.free_page < range->pages) {
			phys_addr_t phys = range->start_phys + restore.free_page++ * PAGE_SIZE;

			if (!is_occupied(phys) && virt_of(phys))
				return phys;
		}
	}
	return 0;
}

static bool add_copy(struct list *list, phys_addr_t home, phys_addr_t from);

/* A page that was set aside; 0 if there is none left. */
static phys_addr_t reserved_page(void)
{
	phys_addr_t phys = restore.reserve;

	if (phys)
		restore.reserve = *(u64 *)virt_of(phys);
	return phys;
}

/* How many pages of a range this kernel occupies. */
static u64 occupied_of(const struct mercury_restart_range *range)
{
	phys_addr_t start = range->start_phys, end = start + range->pages * PAGE_SIZE;
	unsigned int i;
	u64 pages = 0;

	for (i = 0; i < restore.occupied_count; i++) {
		const struct stretch *stretch = &restore.occupied[i];

		if (stretch->start < end && stretch->end > start)
			pages += PHYS_PFN(min(end, stretch->end) - max(start, stretch->start));
	}
	return pages;
}

/* Whether there is room for every frame whose home this kernel occupies, and for so many pages more. */
static bool has_room(u64 aside)
{
	u64 unused = 0, wanted = aside;
	u32 i;

	for (i = 0; i < restore.range_count; i++) {
		const struct mercury_restart_range *range = &restore.ranges[i];

		if (range->kind == MERCURY_RANGE_FREE)
			unused += range->pages - occupied_of(range);
		else
			wanted += occupied_of(range);
	}
	return wanted <= unused;
}

/* Where the memory ends that begins with this range; `next` becomes the first range behind it. */
static phys_addr_t stretch_end(u32 *next)
{
	phys_addr_t end;

	do {
		const struct mercury_restart_range *range = &restore.ranges[(*next)++];

		end = range->start_phys + range->pages * PAGE_SIZE;
	} while (*next < restore.range_count && restore.ranges[*next].start_phys == end);
	return end;
}

/* Sets pages aside: for lists, tables, and the landing itself. */
static u32 set_aside(void)
{
	u64 pages = 2 * (restore.occupied_pages / MERCURY_LANDING_LIST_MAX + 1);
	u32 i = 0;

	pages += (restore.top >> PUD_SHIFT) + (restore.top >> 39) + 16;
	/* Both edges of each stretch of memory may want a table of small pages. */
	for (; i < restore.range_count; stretch_end(&i))
		pages += 2;
	if (restore.again && !has_room(pages))
		return MERCURY_CODE_RESTORE_ROOM;
	while (pages--) {
		phys_addr_t phys = unused_page();

		if (!phys)
			return MERCURY_CODE_RESTORE_ROOM;
		*(u64 *)virt_of(phys) = restore.reserve;
		restore.reserve = phys;
	}
	return MERCURY_CODE_OK;
}

/* A page of any kind where something can wait until the landing; 0 if there is none left. */
static phys_addr_t spare_page(void)
{
	phys_addr_t phys = unused_page();

	if (phys || restore.again || !restore.zero_homes)
		return phys;
	phys = restore.zero_homes;
	restore.zero_homes = *(u64 *)virt_of(phys);
	/* It becomes zero again after everything that waits has gone home. */
	return add_copy(&restore.zeros, phys, 0) ? phys : 0;
}

/* Notes what the landing is to copy; false if there is no room. */
static bool add_copy(struct list *list, phys_addr_t home, phys_addr_t from)
{
	u64 *entry;

	if (!list->virt || list->virt->count == MERCURY_LANDING_LIST_MAX) {
		phys_addr_t phys = reserved_page();

		if (!phys)
			return false;
		list->virt = virt_of(phys);
		list->virt->next_phys = list->first;
		list->virt->count = 0;
		list->first = phys;
	}
	entry = &list->virt->copies[2 * list->virt->count++];
	entry[0] = home;
	entry[1] = from;
	return true;
}

void mercury_restore_end(void)
{
	unsigned int i;

	for (i = 0; i < restore.window_count; i++)
		memunmap(restore.windows[i].virt);
	kvfree(restore.windows);
	kvfree(restore.ranges);
	kvfree(restore.numbers);
	kvfree(restore.cpus);
	kvfree(restore.loaded);
	kvfree(restore.waiting);
	if (restore.root)
		__free_page(restore.root);
	memset(&restore, 0, sizeof(restore));
}

static int add_occupied(struct resource *ram, void *unused)
{
	struct stretch *stretch = &restore.occupied[restore.occupied_count];
	phys_addr_t start = ram->start & PAGE_MASK;

	if (restore.occupied_count == OCCUPIED_MAX)
		return 1;
	/* Two may share a page. */
	if (restore.occupied_count)
		start = max(start, stretch[-1].end);
	stretch->start = start;
	stretch->end = PAGE_ALIGN(ram->end + 1);
	if (stretch->end <= start)
		return 0;
	stretch->before = restore.occupied_pages;
	restore.occupied_pages += PHYS_PFN(stretch->end - start);
	restore.occupied_count++;
	return 0;
}

static int read_arrays(const struct mercury_restart_request *request)
{
	size_t ranges = request->ranges_count * sizeof(*restore.ranges);
	size_t cpus = request->cpus_count * sizeof(*restore.cpus);

	if (!request->ranges_count || request->ranges_count > RANGES_MAX || !request->cpus_count ||
	    request->cpus_count > nr_cpu_ids)
		return MERCURY_CODE_BAD_ARGUMENT;
	restore.ranges = kvmalloc(ranges, GFP_KERNEL);
	restore.numbers = kvmalloc_array(request->ranges_count, sizeof(u64), GFP_KERNEL);
	restore.cpus = kvmalloc(cpus, GFP_KERNEL);
	restore.windows = kvmalloc_array(2 * (request->ranges_count + OCCUPIED_MAX), sizeof(*restore.windows),
					 GFP_KERNEL);
	if (!restore.ranges || !restore.numbers || !restore.cpus || !restore.windows)
		return MERCURY_CODE_NO_MEMORY;
	if (copy_from_user(restore.ranges, u64_to_user_ptr(request->ranges_addr), ranges) ||
	    copy_from_user(restore.cpus, u64_to_user_ptr(request->cpus_addr), cpus))
		return -EFAULT;
	restore.range_count = request->ranges_count;
	restore.cpu_count = request->cpus_count;
	restore.resume_virt = request->resume_virt;
	restore.resume_phys[0] = request->resume_phys[0];
	restore.resume_phys[1] = request->resume_phys[1];
	restore.again = request->flags & MERCURY_RESTART_AGAIN;
	return MERCURY_CODE_OK;
}

/* Ranges must not overlap, wrap, or lie where no memory can be. */
static u32 check_ranges(void)
{
	phys_addr_t limit = BIT_ULL(boot_cpu_data.x86_phys_bits), end = 0;
	u32 i;

	sort(restore.ranges, restore.range_count, sizeof(*restore.ranges), by_start, NULL);
	for (i = 0; i < restore.range_count; i++) {
		const struct mercury_restart_range *range = &restore.ranges[i];

		if (!PAGE_ALIGNED(range->start_phys) || range->start_phys < end ||
		    range->start_phys >= limit || !range->pages ||
		    range->pages > (limit - range->start_phys) / PAGE_SIZE ||
		    range->kind > MERCURY_RANGE_FREE)
			return MERCURY_CODE_BAD_ARGUMENT;
		end = range->start_phys + range->pages * PAGE_SIZE;
		restore.numbers[i] = restore.page_count;
		if (range->kind == MERCURY_RANGE_KEPT)
			restore.page_count += range->pages;
	}
	restore.top = end;
	return MERCURY_CODE_OK;
}

static u64 number_of(phys_addr_t phys);

/* The text that comes next must be in the image. */
static u32 check_resume(void)
{
	if (number_of(restore.resume_phys[0]) == U64_MAX ||
	    (restore.resume_phys[1] && number_of(restore.resume_phys[1]) == U64_MAX) ||
	    !PAGE_ALIGNED(restore.resume_phys[0] | restore.resume_phys[1]) ||
	    (s64)restore.resume_virt >= 0)
		return MERCURY_CODE_BAD_ARGUMENT;
	return MERCURY_CODE_OK;
}

/* The slot of this CPU in the image, or -1. */
static int slot_of(u32 apic_id)
{
	u32 i;

	for (i = 0; i < restore.cpu_count; i++)
		if (restore.cpus[i].apic_id == apic_id)
			return i;
	return -1;
}

static u32 check_machine(const struct mercury_restart_request *request, struct mercury_outcome *outcome)
{
	u64 flags = mercury_machine_modes();
	int cpu;

	if ((request->flags & ~MERCURY_RESTART_AGAIN) != flags) {
		outcome->detail[0] = request->flags;
		outcome->detail[1] = flags;
		return MERCURY_CODE_RESTORE_MODE;
	}
	outcome->detail[0] = restore.cpu_count;
	outcome->detail[1] = num_online_cpus();
	/* One that is there and offline waits in text that will be overwritten. */
	if (restore.cpu_count != num_online_cpus() || num_present_cpus() != num_online_cpus())
		return MERCURY_CODE_RESTORE_CPUS;
	if (sizeof(struct mercury_landing) + restore.cpu_count * sizeof(u64) > PAGE_SIZE)
		return MERCURY_CODE_RESTORE_CPUS;
	for_each_online_cpu(cpu) {
		if (slot_of(per_cpu(x86_cpu_to_apicid, cpu)) >= 0)
			continue;
		outcome->cpu = cpu;
		outcome->detail[0] = per_cpu(x86_cpu_to_apicid, cpu);
		return MERCURY_CODE_RESTORE_CPUS;
	}
	return MERCURY_CODE_OK;
}

/* Whether something else than memory is known to be there. */
static bool is_device(phys_addr_t start, phys_addr_t end)
{
	struct pci_dev *device = NULL;
	unsigned int i;

	/* What every PC has below 4 GiB: I/O APICs, timers, local APICs, the firmware. */
	if (start < SZ_4G && end > 0xfec00000)
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

static u32 add_window(phys_addr_t start, phys_addr_t end)
{
	struct window *window = &restore.windows[restore.window_count];
	phys_addr_t large = ALIGN(start, PMD_SIZE);
	u32 code;

	if (start >= end)
		return MERCURY_CODE_OK;
	/*
	 * What begins at no large page is mapped in small ones, all of it: up to one it is another window.
	 */
	if (start < large && large < end) {
		code = add_window(start, large);
		return code == MERCURY_CODE_OK ? add_window(large, end) : code;
	}
	if (is_device(start, end))
		return MERCURY_CODE_RESTORE_OVERLAP;
	window->range.start = start;
	window->range.end = end;
	window->virt = memremap(start, end - start, MEMREMAP_WB);
	if (!window->virt)
		return MERCURY_CODE_NO_MEMORY;
	restore.window_count++;
	return MERCURY_CODE_OK;
}

/* Memory that was plugged in has to be in its slot. */
static u32 check_memory(struct mercury_outcome *outcome)
{
	struct mercury_plugged *plugged = mercury_plugged_find();
	u32 code = MERCURY_CODE_OK, i;

	if (!plugged)
		return MERCURY_CODE_NO_MEMORY;
	for (i = 0; code == MERCURY_CODE_OK && i < restore.range_count; i++)
		code = mercury_plugged_check(plugged, restore.ranges[i].start_phys, restore.ranges[i].pages,
					     outcome);
	mercury_plugged_free(plugged);
	return code;
}

/* Maps what of a stretch of memory this kernel does not occupy. */
static u32 add_windows(phys_addr_t start, phys_addr_t end)
{
	unsigned int i;
	u32 code;

	for (i = 0; i < restore.occupied_count; i++) {
		const struct stretch *occupied = &restore.occupied[i];

		if (occupied->end <= start || occupied->start >= end)
			continue;
		code = add_window(start, occupied->start);
		if (code != MERCURY_CODE_OK)
			return code;
		start = occupied->end;
	}
	return add_window(start, end);
}

/* Maps the image's memory, ranges that touch each other at once. */
static u32 map_memory(void)
{
	u32 i = 0, code;

	while (i < restore.range_count) {
		phys_addr_t start = restore.ranges[i].start_phys, end = start;

		for (; i < restore.range_count && restore.ranges[i].start_phys == end; i++)
			end += restore.ranges[i].pages * PAGE_SIZE;
		code = add_windows(start, end);
		if (code != MERCURY_CODE_OK)
			return code;
	}
	return MERCURY_CODE_OK;
}

#define PCI_CLASS_IOMMU	0x0806

/*
 * Devices that no driver has stopped must not write to memory. An IOMMU has no driver here, and is needed
 * by the kernel of the image before that gives devices their bus mastering back.
 */
static void stop_other_devices(void)
{
	struct pci_dev *device = NULL;

	for_each_pci_dev(device)
		if (!device->driver && device->hdr_type == PCI_HEADER_TYPE_NORMAL &&
		    device->class >> 8 != PCI_CLASS_IOMMU)
			pci_clear_master(device);
}

static int begin(const struct mercury_restart_request *request, struct mercury_outcome *outcome)
{
	int result = read_arrays(request);
	u32 code;

	if (result)
		return result;
	code = check_ranges();
	if (code == MERCURY_CODE_OK)
		code = check_resume();
	if (code == MERCURY_CODE_OK)
		code = check_machine(request, outcome);
	if (code == MERCURY_CODE_OK)
		code = check_memory(outcome);
	if (code != MERCURY_CODE_OK)
		return code;
	if (walk_iomem_res_desc(IORES_DESC_NONE, IORESOURCE_SYSTEM_RAM | IORESOURCE_BUSY, 0, -1, NULL,
				add_occupied))
		return MERCURY_CODE_RESTORE_OVERLAP;
	/* The ordinary kernel of this machine leaves no room. */
	outcome->detail[0] = restore.occupied_pages;
	outcome->detail[1] = restore.page_count;
	if (restore.occupied_pages >= restore.page_count)
		return MERCURY_CODE_RESTORE_OVERLAP;
	restore.loaded = kvcalloc(BITS_TO_LONGS(restore.page_count), sizeof(long), GFP_KERNEL);
	restore.waiting = kvcalloc(restore.occupied_pages, sizeof(u64), GFP_KERNEL);
	restore.root = alloc_page(GFP_KERNEL | __GFP_ZERO);
	if (!restore.loaded || !restore.waiting || !restore.root)
		return MERCURY_CODE_NO_MEMORY;
	stop_other_devices();
	code = map_memory();
	return code == MERCURY_CODE_OK ? set_aside() : code;
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

/* The number of a page that the image holds, or U64_MAX. */
static u64 number_of(phys_addr_t phys)
{
	u32 low = 0, high = restore.range_count;
	u64 number;

	while (low < high) {
		u32 middle = (low + high) / 2;
		const struct mercury_restart_range *range = &restore.ranges[middle];

		if (phys < range->start_phys) {
			high = middle;
		} else if (phys - range->start_phys >= range->pages * PAGE_SIZE) {
			low = middle + 1;
		} else {
			number = restore.numbers[middle] + (phys - range->start_phys) / PAGE_SIZE;
			return range->kind == MERCURY_RANGE_KEPT ? number : U64_MAX;
		}
	}
	return U64_MAX;
}

/* Where the content of a frame is that has been loaded; NULL if there is none. */
static void *content_of(phys_addr_t phys)
{
	u64 number = PAGE_ALIGNED(phys) ? number_of(phys) : U64_MAX;
	u64 occupied = occupied_number(phys);

	if (number == U64_MAX || !test_bit(number, restore.loaded))
		return NULL;
	if (occupied == U64_MAX)
		return virt_of(phys);
	return restore.waiting[occupied] ? virt_of(restore.waiting[occupied]) : NULL;
}

static u32 load_zero(phys_addr_t home)
{
	void *virt = virt_of(home);

	if (!virt)
		return add_copy(&restore.zeros, home, 0) ? MERCURY_CODE_OK : MERCURY_CODE_RESTORE_ROOM;
	memset(virt, 0, PAGE_SIZE);
	*(u64 *)virt = restore.zero_homes;
	restore.zero_homes = home;
	return MERCURY_CODE_OK;
}

/* Where a frame's content is to be put; NULL if there is no room. */
static void *place_for(phys_addr_t home)
{
	u64 occupied = occupied_number(home);
	phys_addr_t spare;

	if (occupied == U64_MAX)
		return virt_of(home);
	/* It has come before. */
	if (restore.waiting[occupied])
		return virt_of(restore.waiting[occupied]);
	spare = spare_page();
	if (!spare || !add_copy(&restore.copies, home, spare))
		return NULL;
	restore.waiting[occupied] = spare;
	return virt_of(spare);
}

static int load_one(const struct mercury_load_entry *entry, const void __user **data)
{
	u64 number = PAGE_ALIGNED(entry->frame_phys) ? number_of(entry->frame_phys) : U64_MAX;
	const void *twin = NULL;
	void *place;

	if (number == U64_MAX || (test_bit(number, restore.loaded) && !restore.again))
		return MERCURY_CODE_RESTORE_FRAME;
	if (entry->source == MERCURY_LOAD_ZERO && !restore.again) {
		u32 code = load_zero(entry->frame_phys);

		if (code != MERCURY_CODE_OK)
			return code;
		goto loaded;
	}
	if (entry->source != MERCURY_LOAD_DATA && entry->source != MERCURY_LOAD_ZERO) {
		twin = content_of(entry->source);
		if (!twin)
			return MERCURY_CODE_RESTORE_FRAME;
	}
	place = place_for(entry->frame_phys);
	if (!place)
		return MERCURY_CODE_RESTORE_ROOM;
	if (twin) {
		memcpy(place, twin, PAGE_SIZE);
		goto loaded;
	}
	if (entry->source == MERCURY_LOAD_ZERO) {
		memset(place, 0, PAGE_SIZE);
		goto loaded;
	}
	if (copy_from_user(place, *data, PAGE_SIZE))
		return -EFAULT;
	*data += PAGE_SIZE;
loaded:
	if (!__test_and_set_bit(number, restore.loaded))
		restore.loaded_count++;
	return MERCURY_CODE_OK;
}

int mercury_restore_load(const struct mercury_load_frames_request *request,
			 struct mercury_outcome *outcome)
{
	const struct mercury_load_entry __user *entries = u64_to_user_ptr(request->entries_addr);
	const void __user *data = u64_to_user_ptr(request->data_addr);
	struct mercury_load_entry entry;
	u64 i;

	if (!restore.ranges)
		return MERCURY_CODE_NO_SNAPSHOT;
	for (i = 0; i < request->count; i++) {
		int result;

		if (copy_from_user(&entry, entries + i, sizeof(entry)))
			return -EFAULT;
		outcome->detail[0] = entry.frame_phys;
		outcome->detail[1] = entry.source;
		result = load_one(&entry, &data);
		if (result != MERCURY_CODE_OK)
			return result;
		if (fatal_signal_pending(current))
			return -EINTR;
		cond_resched();
	}
	return MERCURY_CODE_OK;
}

/* Gives frames back to who has loaded them. */
int mercury_restore_read(const struct mercury_load_frames_request *request,
			 struct mercury_outcome *outcome)
{
	const struct mercury_load_entry __user *entries = u64_to_user_ptr(request->entries_addr);
	void __user *data = u64_to_user_ptr(request->data_addr);
	struct mercury_load_entry entry;
	const void *content;
	u64 i;

	if (!restore.ranges)
		return MERCURY_CODE_NO_SNAPSHOT;
	for (i = 0; i < request->count; i++, data += PAGE_SIZE) {
		if (copy_from_user(&entry, entries + i, sizeof(entry)))
			return -EFAULT;
		outcome->detail[0] = entry.frame_phys;
		content = content_of(entry.frame_phys);
		if (!content)
			return MERCURY_CODE_RESTORE_FRAME;
		if (copy_to_user(data, content, PAGE_SIZE))
			return -EFAULT;
		cond_resched();
	}
	return MERCURY_CODE_OK;
}

/* The table below an entry, made if there is none; NULL if there is no room. */
static u64 *table_below(u64 *entry)
{
	if (!*entry) {
		phys_addr_t phys = reserved_page();

		if (!phys)
			return NULL;
		memset(virt_of(phys), 0, PAGE_SIZE);
		*entry = phys | TABLE_FLAGS;
	}
	return virt_of(*entry & PHYSICAL_PAGE_MASK);
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
 * The image's memory at its physical address, and not a page more: what lies beside may be broken, or the
 * firmware's, and must not be read even by speculation. And the text that comes next at its own.
 */
static u32 map_landing(u64 *root)
{
	u64 text = restore.resume_virt & PAGE_MASK;
	u32 code = MERCURY_CODE_OK, i = 0;

	while (code == MERCURY_CODE_OK && i < restore.range_count) {
		phys_addr_t phys = restore.ranges[i].start_phys, end = stretch_end(&i);

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

/* What this kernel knows of randomness, for the other one. */
static u32 give_seeds(void)
{
	u32 i;

	for (i = 0; i < restore.cpu_count; i++) {
		phys_addr_t phys = restore.cpus[i].saved_phys;
		struct mercury_saved_cpu *saved = content_of(phys & PAGE_MASK);

		if (!saved || offset_in_page(phys) > PAGE_SIZE - sizeof(*saved))
			return MERCURY_CODE_RESTORE_FRAME;
		saved = (void *)saved + offset_in_page(phys);
		get_random_bytes(saved->seed, sizeof(saved->seed));
	}
	return MERCURY_CODE_OK;
}

/* Everything that the landing needs, where nothing is copied to. */
static u32 prepare(void)
{
	struct mercury_landing *landing;
	u64 *cpus, *root, *kernel;
	phys_addr_t root_phys;
	u32 code, i;

	restore.landing = reserved_page();
	restore.code = reserved_page();
	root_phys = reserved_page();
	/* The page has room for the CPUs behind the structure. */
	if (!restore.landing || !restore.code || !root_phys)
		return MERCURY_CODE_RESTORE_ROOM;
	root = virt_of(root_phys);
	memset(root, 0, PAGE_SIZE);
	code = map_landing(root);
	if (code != MERCURY_CODE_OK)
		return code;

	/* This kernel's tables, with the landing's below. */
	kernel = page_address(restore.root);
	memcpy(kernel, __va(read_cr3_pa()), PAGE_SIZE);
	memcpy(kernel, root, PAGE_SIZE / 2);

	memcpy(virt_of(restore.code), mercury_landing, mercury_landing_end - mercury_landing);
	landing = virt_of(restore.landing);
	memset(landing, 0, PAGE_SIZE);
	cpus = (u64 *)(landing + 1);
	for (i = 0; i < restore.cpu_count; i++)
		cpus[i] = restore.cpus[i].saved_phys;
	landing->root_phys = root_phys;
	landing->cpus_phys = restore.landing + sizeof(*landing);
	landing->resume_virt = restore.resume_virt;
	landing->cpus = restore.cpu_count;

	/* Zeros come last: what waits may wait at their homes. Nothing is allocated from here on. */
	while (restore.zero_homes) {
		u64 *virt = virt_of(restore.zero_homes);

		restore.zero_homes = *virt;
		*virt = 0;
	}
	landing->list_phys = restore.zeros.first;
	if (restore.copies.first) {
		struct mercury_landing_list *last = virt_of(restore.copies.first);

		while (last->next_phys)
			last = virt_of(last->next_phys);
		last->next_phys = restore.zeros.first;
		landing->list_phys = restore.copies.first;
	}
	return MERCURY_CODE_OK;
}

/* Beneath KVM: it writes to addresses of this kernel until it is told not to. */
static void stop_paravirtualization(void)
{
	static const u32 msrs[] = { MSR_KVM_STEAL_TIME, MSR_KVM_ASYNC_PF_EN, MSR_KVM_PV_EOI_EN,
				    MSR_KVM_SYSTEM_TIME_NEW };
	unsigned int i;

	for (i = 0; boot_cpu_has(X86_FEATURE_HYPERVISOR) && i < ARRAY_SIZE(msrs); i++)
		wrmsrl_safe(msrs[i], 0);
}

/* All CPUs at once, interrupts off. Comes back only if the kernel refuses to stop. */
static int land(void *unused)
{
	int slot = slot_of(per_cpu(x86_cpu_to_apicid, smp_processor_id()));

	if (smp_processor_id() == restore.first_cpu)
		WRITE_ONCE(restore.ready, syscore_suspend() ? 2 : 1);
	while (!READ_ONCE(restore.ready))
		cpu_relax();
	if (restore.ready == 2)
		return -EBUSY;
	native_set_debugreg(7, 0x400);
	stop_paravirtualization();
	mercury_land(page_to_phys(restore.root), restore.code, restore.landing, slot);
	return 0;
}

static int leave(void *unused)
{
	int cpu, err;

	if (num_online_cpus() != restore.cpu_count)
		return -EBUSY;
	for_each_online_cpu(cpu)
		if (slot_of(per_cpu(x86_cpu_to_apicid, cpu)) < 0)
			return -EBUSY;
	stop_other_devices();
	/* Not every network card stops when it is told to, and what it receives would go over the image. */
	err = mercury_dma_stop();
	if (err)
		return err;
	restore.first_cpu = cpumask_first(cpu_online_mask);
	err = stop_machine(land, NULL, cpu_online_mask);
	mercury_dma_start(false);
	return err;
}

int mercury_restore_go(void)
{
	u32 code;

	if (!restore.ranges)
		return MERCURY_CODE_NO_SNAPSHOT;
	if (mercury.state != MERCURY_STATE_UNLOADED)
		return MERCURY_CODE_ALREADY_LOADED;
	if (restore.loaded_count != restore.page_count)
		return MERCURY_CODE_RESTORE_INCOMPLETE;
	if (restore.landing)
		return MERCURY_CODE_RESTORE_QUIESCE;
	code = give_seeds();
	if (code == MERCURY_CODE_OK)
		code = prepare();
	if (code != MERCURY_CODE_OK)
		return code;
	pr_info("going on in the machine of the image\n");
	WRITE_ONCE(mercury.waits_for_sleep, true);
	hibernate_quiet_exec(leave, NULL);
	WRITE_ONCE(mercury.waits_for_sleep, false);
	return MERCURY_CODE_RESTORE_QUIESCE;
}
