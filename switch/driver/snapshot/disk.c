// SPDX-License-Identifier: GPL-2.0-only
/*
 * The dirty log of a disk, so that a disk can be copied while it is written to. A chunk is noted when a
 * request that changes it is handed to the device, and again when the request is done, whether it failed or
 * not. A reader first collects the log and then reads the chunks in it. It misses no write: a request that
 * was not done when the chunk was read is noted again. A request that was handed over before the log began
 * is noted when it is done. If it was done by then, the first copy of the disk has it.
 *
 * The block layer's tracepoints tell both, for all disks that have requests, and for the whole disk
 * whichever partition is written to. Disks without requests (device mapper, RAID, NVMe with several paths)
 * have no log.
 *
 * A command that a process gives a disk directly (SG_IO, NVMe's passthrough) may write anywhere unless it
 * reads. All chunks are noted then.
 */
#include <linux/bitmap.h>
#include <linux/blk-mq.h>
#include <linux/blkdev.h>
#include <linux/file.h>
#include <linux/fs.h>
#include <linux/mm.h>
#include <linux/slab.h>
#include <linux/tracepoint.h>
#include <linux/uaccess.h>

#include "snapshot.h"

struct disk_log {
	/* Holds the disk, also when it is pulled out. */
	struct file *file;
	const struct gendisk *disk;
	unsigned int chunk_shift;
	unsigned long chunks;
	/* All of it may have been written. */
	unsigned long all;
	unsigned long *written;
};

/* Read with preemption disabled, in a tracepoint; written under mercury.lock. */
static struct disk_log *logs[MERCURY_DISK_LOGS_MAX];

static void note_bytes(struct disk_log *log, u64 start, u64 length)
{
	u64 chunk = start >> log->chunk_shift, end;

	if (!length)
		return;
	/* A reader that compares the disk's size notices chunks beyond the end that it had. */
	end = min_t(u64, log->chunks, ((start + length - 1) >> log->chunk_shift) + 1);
	for (; chunk < end; chunk++)
		set_bit(chunk, log->written);
}

static void note(struct disk_log *log, const struct request *rq)
{
	const struct bio *bio;

	if (blk_rq_is_passthrough((struct request *)rq)) {
		if (req_op(rq) == REQ_OP_DRV_OUT || !blk_rq_bytes(rq))
			WRITE_ONCE(log->all, 1);
		return;
	}
	if (!op_is_write(req_op(rq)))
		return;
	/* The parts of a discard need not lie together. */
	__rq_for_each_bio(bio, rq)
		note_bytes(log, (u64)bio->bi_iter.bi_sector << SECTOR_SHIFT, bio->bi_iter.bi_size);
}

static void note_request(const struct request *rq)
{
	const struct gendisk *disk = READ_ONCE(rq->q->disk);
	unsigned int i;

	for (i = 0; disk && i < ARRAY_SIZE(logs); i++) {
		/* Pairs with begin(): a CPU that sees the log sees its map. */
		struct disk_log *log = smp_load_acquire(&logs[i]);

		if (log && log->disk == disk)
			note(log, rq);
	}
}

static void is_issued(void *data, struct request *rq)
{
	note_request(rq);
}

static void is_complete(void *data, struct request *rq, blk_status_t error, unsigned int bytes)
{
	note_request(rq);
}

static struct {
	const char *name;
	void *probe;
	struct tracepoint *point;
	bool registered;
} probes[] = {
	{ .name = "block_rq_issue", .probe = is_issued },
	{ .name = "block_rq_complete", .probe = is_complete },
};

static void find(struct tracepoint *point, void *unused)
{
	unsigned int i;

	for (i = 0; i < ARRAY_SIZE(probes); i++)
		if (!strcmp(point->name, probes[i].name))
			probes[i].point = point;
}

static void unwatch(void)
{
	unsigned int i;

	for (i = 0; i < ARRAY_SIZE(probes); i++) {
		if (probes[i].registered)
			tracepoint_probe_unregister(probes[i].point, probes[i].probe, NULL);
		probes[i].registered = false;
	}
}

static u32 watch(void)
{
	unsigned int i;

	for_each_kernel_tracepoint(find, NULL);
	for (i = 0; i < ARRAY_SIZE(probes); i++) {
		if (probes[i].registered)
			continue;
		if (!probes[i].point || tracepoint_probe_register(probes[i].point, probes[i].probe, NULL)) {
			unwatch();
			return MERCURY_CODE_DISK_UNSUPPORTED;
		}
		probes[i].registered = true;
	}
	return MERCURY_CODE_OK;
}

static void end(unsigned int number)
{
	struct disk_log *log = logs[number];
	unsigned int i;

	WRITE_ONCE(logs[number], NULL);
	for (i = 0; i < ARRAY_SIZE(logs) && !logs[i]; i++)
		;
	if (i == ARRAY_SIZE(logs))
		unwatch();
	/* No CPU notes anything in it any more, or runs in this file if it was the last. */
	tracepoint_synchronize_unregister();
	fput(log->file);
	kvfree(log->written);
	kfree(log);
}

/* Under mercury.lock: all of them. */
void mercury_disk_log_release(void)
{
	unsigned int i;

	for (i = 0; i < ARRAY_SIZE(logs); i++)
		if (logs[i])
			end(i);
}

/* The number of a disk's log, or of a free place. */
static int find_log(const struct gendisk *disk)
{
	unsigned int i;

	for (i = 0; i < ARRAY_SIZE(logs); i++)
		if (disk ? logs[i] && logs[i]->disk == disk : !logs[i])
			return i;
	return -1;
}

/* A disk with requests, as a whole. */
static struct block_device *disk_of(const struct file *file)
{
	struct block_device *device;

	if (!S_ISBLK(file_inode(file)->i_mode))
		return NULL;
	device = I_BDEV(file->f_mapping->host);
	if (bdev_is_partition(device) || bdev_is_zoned(device) || !queue_is_mq(device->bd_disk->queue))
		return NULL;
	return device;
}

static u32 begin(struct file *file, const struct block_device *device,
		 struct mercury_disk_log_request *request)
{
	int number = find_log(NULL);
	struct disk_log *log;
	u64 bytes;

	bytes = (u64)get_capacity(device->bd_disk) << SECTOR_SHIFT;
	if (number < 0 || find_log(device->bd_disk) >= 0)
		return MERCURY_CODE_DISK_LOGGED;
	if (!bytes || request->chunk_shift < MERCURY_DISK_CHUNK_SHIFT_MIN ||
	    request->chunk_shift > MERCURY_DISK_CHUNK_SHIFT_MAX)
		return MERCURY_CODE_BAD_ARGUMENT;
	log = kzalloc(sizeof(*log), GFP_KERNEL);
	if (!log)
		return MERCURY_CODE_NO_MEMORY;
	log->disk = device->bd_disk;
	log->chunk_shift = request->chunk_shift;
	log->chunks = ((bytes - 1) >> log->chunk_shift) + 1;
	log->written = kvcalloc(BITS_TO_LONGS(log->chunks), sizeof(long), GFP_KERNEL);
	if (!log->written) {
		kfree(log);
		return MERCURY_CODE_NO_MEMORY;
	}
	log->file = get_file(file);
	request->chunks = log->chunks;
	/* Pairs with note_request(). */
	smp_store_release(&logs[number], log);
	if (watch() != MERCURY_CODE_OK) {
		end(number);
		return MERCURY_CODE_DISK_UNSUPPORTED;
	}
	return MERCURY_CODE_OK;
}

/*
 * Hands over the chunks that were noted, and clears them. If user space cannot be written to, all chunks
 * are noted again.
 */
static int collect(struct disk_log *log, struct mercury_disk_log_request *request)
{
	u64 __user *to = u64_to_user_ptr(request->map_addr);
	unsigned long words = BITS_TO_LONGS(log->chunks), i;
	unsigned long all;

	if (request->map_words != words)
		return MERCURY_CODE_BAD_ARGUMENT;
	all = xchg(&log->all, 0) ? ~0UL : 0;
	request->chunks = 0;
	for (i = 0; i < words; i++) {
		unsigned long found = all;

		if (READ_ONCE(log->written[i]))
			found |= xchg(&log->written[i], 0);
		if (i == words - 1)
			found &= BITMAP_LAST_WORD_MASK(log->chunks);
		request->chunks += hweight_long(found);
		if (put_user((u64)found, to + i)) {
			WRITE_ONCE(log->all, 1);
			return -EFAULT;
		}
		if (!(i % PAGE_SIZE))
			cond_resched();
	}
	return MERCURY_CODE_OK;
}

static int act(struct file *file, struct mercury_disk_log_request *request)
{
	const struct block_device *device = disk_of(file);
	int number;

	if (!device)
		return MERCURY_CODE_DISK_UNSUPPORTED;
	if (request->what == MERCURY_DISK_LOG_BEGIN)
		return begin(file, device, request);
	number = find_log(device->bd_disk);
	if (number < 0)
		return MERCURY_CODE_NO_DISK_LOG;
	if (request->what == MERCURY_DISK_LOG_COLLECT)
		return collect(logs[number], request);
	end(number);
	return MERCURY_CODE_OK;
}

/* Begins, collects or ends the log of a disk; under mercury.lock. */
int mercury_disk_log(struct mercury_disk_log_request *request)
{
	struct file *file;
	int result;

	if (request->what > MERCURY_DISK_LOG_END || request->reserved)
		return MERCURY_CODE_BAD_ARGUMENT;
	file = fget(request->disk_fd);
	if (!file)
		return MERCURY_CODE_BAD_ARGUMENT;
	result = act(file, request);
	fput(file);
	return result;
}
