// SPDX-License-Identifier: GPL-2.0-only
/*
 * Reading frames for user space: as memory held them at the instant, or before the instant as they are now.
 */
#include <linux/gfp.h>
#include <linux/log2.h>
#include <linux/memory_hotplug.h>
#include <linux/mm.h>
#include <linux/sched/signal.h>
#include <linux/uaccess.h>
#include <asm/io.h>

#include "snapshot.h"

static struct {
	/* The argument of a call to read frames, and the pages that it reads them to. */
	struct mercury_read_list *list;
	void *buffer;
	/* By the number of a kept page: hashes of the frames at the instant, in builds with fault points. */
	u64 *hashes;
	/* Where the block of free frames ends that the last frame read as it is now was in. */
	phys_addr_t free_end;
	/* Memory broke after it was found to be sound. */
	bool broken;
} read;

u32 mercury_read_allocate(u64 flags, unsigned long ram_pages)
{
	read.list = mercury_piece(0, GFP_KERNEL);
	read.buffer = mercury_piece(ilog2(MERCURY_READ_LIST_MAX), GFP_KERNEL);
	if (!read.list || !read.buffer)
		return MERCURY_CODE_NO_MEMORY;
	if (flags & MERCURY_SNAPSHOT_HASH) {
		read.hashes = mercury_piece_of(ram_pages * sizeof(u64), GFP_KERNEL);
		if (!read.hashes)
			return MERCURY_CODE_NO_CONTIGUOUS_MEMORY;
	}
	return MERCURY_CODE_OK;
}

void mercury_read_forget(void)
{
	memset(&read, 0, sizeof(read));
}

/* Returns where the hypervisor puts the hashes of frames at the instant; NULL: nowhere. */
u64 *mercury_read_hashes(void)
{
	return read.hashes;
}

/* Returns true if the memory has broken meanwhile: to read it would be a machine check. */
static bool is_broken(u64 frame)
{
	struct page *page = pfn_to_online_page(PHYS_PFN(frame));

	return page && PageHWPoison(page);
}

/* Lists the next wanted frames from the cursor on, at most `room`. Returns how many there are. */
static u32 list_frames(struct mercury_snapshot_read_request *request, const struct mercury_wanted *wanted,
		       u64 room)
{
	const struct mercury_kept *kept = mercury_kept();
	struct mercury_read_list *list = read.list;
	unsigned int i;

	list->count = 0;
	list->reserved = 0;
	for (i = 0; i < kept->count; i++) {
		const struct mercury_owned_range *range = &kept->ranges[i];
		u64 end = min(range->start_phys + range->pages * PAGE_SIZE, request->end_phys);
		u64 frame = max(request->cursor_phys, range->start_phys);

		for (; frame < end; frame += PAGE_SIZE) {
			frame = mercury_frames_next(wanted, frame, end);
			if (frame == end)
				break;
			if (list->count == min_t(u64, room, MERCURY_READ_LIST_MAX)) {
				request->cursor_phys = frame;
				return list->count;
			}
			if (is_broken(frame)) {
				read.broken = true;
				list->count = 0;
				return 0;
			}
			list->entries[list->count].frame_phys = frame;
			list->entries[list->count].to_phys =
				virt_to_phys(read.buffer) + list->count * PAGE_SIZE;
			list->count++;
		}
	}
	request->cursor_phys = U64_MAX;
	return list->count;
}

/* Hands a frame that was read to user space. */
static int put_frame(struct mercury_snapshot_read_request *request, u32 entry, u64 hash)
{
	u64 __user *frames = u64_to_user_ptr(request->frames_addr);
	u64 __user *hashes = u64_to_user_ptr(request->hashes_addr);
	void __user *data = u64_to_user_ptr(request->data_addr);
	u64 slot = request->count;

	if (put_user(read.list->entries[entry].frame_phys, frames + slot) ||
	    copy_to_user(data + slot * PAGE_SIZE, read.buffer + entry * PAGE_SIZE, PAGE_SIZE))
		return -EFAULT;
	if (request->hashes_addr && put_user(hash, hashes + slot))
		return -EFAULT;
	request->count++;
	return MERCURY_CODE_OK;
}

/*
 * Reads the listed frames as they were at the instant, but for those that were read before; or as they were
 * at the end of the last life.
 */
static int read_past(struct mercury_snapshot_read_request *request)
{
	u64 call = mercury_snapshot_is_kept() ? MERCURY_SNAPSHOT_CALL_READ_DEAD : MERCURY_SNAPSHOT_CALL_READ;
	struct mercury_read_list *list = read.list;
	u32 i, code;
	int err;

	code = mercury_snapshot_call_for(call, list, &request->low);
	if (code != MERCURY_CODE_OK)
		return code;
	for (i = 0; i < list->count; i++) {
		u64 hash = 0;

		if (list->read_before & BIT_ULL(i))
			continue;
		if (read.hashes)
			hash = read.hashes[mercury_kept_number(list->entries[i].frame_phys)];
		err = put_frame(request, i, hash);
		if (err)
			return err;
	}
	return MERCURY_CODE_OK;
}

/*
 * Returns how many frames from this one on were free just now; the kernel may have allocated them since. The
 * zone's lock is held: a block may be marked free before its order is written, and the order of an earlier
 * block would pass for its own. No block is larger than the maximum.
 */
static u64 free_frames(phys_addr_t frame)
{
	struct page *page = pfn_to_online_page(PHYS_PFN(frame));
	enum mercury_page_use use;
	unsigned long count, flags;

	if (!page || !PageBuddy(page))
		return 0;
	spin_lock_irqsave(&page_zone(page)->lock, flags);
	count = mercury_dma_stretch(page, 1, &use);
	spin_unlock_irqrestore(&page_zone(page)->lock, flags);
	return use == MERCURY_PAGE_FREE ? min_t(unsigned long, count, MAX_ORDER_NR_PAGES) : 0;
}

/*
 * Reads a frame as it is now; a free one reads as zeros. A frame that only the hypervisor can read
 * (memfd_secret) counts as written, so that it is read at the instant.
 */
static void read_frame(phys_addr_t frame, void *to)
{
	if (frame >= read.free_end)
		read.free_end = frame + free_frames(frame) * PAGE_SIZE;
	if (frame >= read.free_end) {
		if (!copy_from_kernel_nofault(to, __va(frame), PAGE_SIZE))
			return;
		mercury_dma_log_written(PHYS_PFN(frame));
	}
	memset(to, 0, PAGE_SIZE);
}

/* Reads the listed frames as they are now. */
static int read_present(struct mercury_snapshot_read_request *request)
{
	int err;
	u32 i;

	for (i = 0; i < read.list->count; i++) {
		read_frame(read.list->entries[i].frame_phys, read.buffer + i * PAGE_SIZE);
		err = put_frame(request, i, 0);
		if (err)
			return err;
	}
	return MERCURY_CODE_OK;
}

static bool is_page_or_end(u64 phys)
{
	return PAGE_ALIGNED(phys) || phys == U64_MAX;
}

/* Reads the wanted frames from the cursor on, as many as there is room for. */
static int read_frames(struct mercury_snapshot_read_request *request,
		       int (*read_listed)(struct mercury_snapshot_read_request *request))
{
	struct mercury_wanted wanted = {};
	u64 room = request->count;
	int err;

	request->count = 0;
	request->low = 0;
	if (request->flags & ~(MERCURY_READ_LOGGED | MERCURY_READ_USED) ||
	    !is_page_or_end(request->cursor_phys) || !is_page_or_end(request->end_phys))
		return MERCURY_CODE_BAD_ARGUMENT;
	if (request->flags & MERCURY_READ_USED)
		wanted.free = mercury_scan_free(&wanted.count);
	if (request->flags & MERCURY_READ_LOGGED) {
		wanted.collected = mercury_dirty_log_collected(&wanted.count);
		if (!wanted.collected)
			return MERCURY_CODE_BAD_ARGUMENT;
	}
	while (request->count < room && request->cursor_phys != U64_MAX) {
		if (!list_frames(request, &wanted, room - request->count))
			return read.broken ? MERCURY_CODE_SNAPSHOT_HOTPLUG : MERCURY_CODE_OK;
		err = read_listed(request);
		if (err)
			return err;
		if (signal_pending(current))
			break;
		cond_resched();
	}
	return MERCURY_CODE_OK;
}

int mercury_read_past(struct mercury_snapshot_read_request *request)
{
	return read_frames(request, read_past);
}

int mercury_read_present(struct mercury_snapshot_read_request *request)
{
	/* Only the first page of a free block says that it is free: the end outlasts a list of frames. */
	read.free_end = 0;
	return read_frames(request, read_present);
}
