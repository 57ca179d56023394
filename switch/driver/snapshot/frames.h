/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Arithmetic on page frames. It knows nothing of the kernel, and is tested on the host
 * (switch/driver-tests).
 */
#ifndef MERCURY_FRAMES_H
#define MERCURY_FRAMES_H

#include <linux/types.h>

struct mercury_owned_range;

int mercury_frames_by_start(const void *left, const void *right);
s64 mercury_frames_number(const struct mercury_owned_range *ranges, const u64 *numbers, unsigned int count,
			  u64 phys);
u32 mercury_frames_without(u64 start, u64 end, const struct mercury_owned_range *holes, unsigned int count,
			   u32 (*keep)(u64 start, u64 end));

/**
 * struct mercury_wanted - the frames that a read wants
 * @collected: by page frame number, in pieces: frames that were written; NULL: written or not
 * @free: likewise: free frames, which are not wanted; NULL: free or not
 * @count: the pieces of each map; one that is not there has no memory
 */
struct mercury_wanted {
	unsigned long **collected;
	unsigned long **free;
	unsigned long count;
};

u64 mercury_frames_next(const struct mercury_wanted *wanted, u64 frame, u64 end);

#endif /* MERCURY_FRAMES_H */
