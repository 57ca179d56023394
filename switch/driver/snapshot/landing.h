/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Arithmetic of a landing. It knows nothing of the kernel, and is tested on the host (switch/driver-tests).
 *
 * A machine goes on in place of this kernel. Each frame of its image has a destination frame. Most of those
 * lie beyond this kernel's memory, and are loaded at once. A frame whose destination this kernel occupies
 * waits elsewhere, in a page that the image leaves out and that this kernel does not occupy.
 */
#ifndef MERCURY_LANDING_H
#define MERCURY_LANDING_H

#include <linux/types.h>

struct mercury_landing_list;
struct mercury_load_entry;
struct mercury_restart_range;

#define MERCURY_NO_NUMBER	U64_MAX
#define MERCURY_OCCUPIED_MAX	64

/**
 * struct mercury_occupied - a stretch of memory that this kernel occupies
 * @start: its first byte
 * @end: the byte after its last
 * @before: the pages of all stretches before it
 */
struct mercury_occupied {
	u64 start, end, before;
};

/**
 * struct mercury_plan - memory of the image and of this kernel
 * @ranges: memory of the machine in the image, ascending
 * @numbers: for each range, the kept pages before it
 * @range_count: the number of ranges
 * @page_count: the pages that the image holds
 * @top: the end of the last range
 * @occupied: what this kernel occupies, ascending
 * @occupied_count: the number of stretches
 * @occupied_pages: their pages
 * @next_range: the range of the next page that the image leaves out
 * @next_page: the number of that page in its range
 */
struct mercury_plan {
	const struct mercury_restart_range *ranges;
	u64 *numbers;
	u32 range_count;
	u64 page_count;
	u64 top;
	struct mercury_occupied occupied[MERCURY_OCCUPIED_MAX];
	u32 occupied_count;
	u64 occupied_pages;
	u32 next_range;
	u64 next_page;
};

/**
 * struct mercury_copies - pages of copies that the landing makes
 * @first: the newest page, which leads to the older ones
 * @virt: its address
 */
struct mercury_copies {
	u64 first;
	struct mercury_landing_list *virt;
};

/**
 * struct mercury_places - the frames of an image, and their places until the landing
 * @plan: memory of the image and of this kernel
 * @again: frames may be loaded again, and hold what they were loaded with last
 * @loaded: by the number of a page of the image: it has been loaded
 * @empty: likewise: it was loaded as zeros, and another frame may wait in it
 * @loaded_count: the pages that have been loaded
 * @waiting: by the number of a page that this kernel occupies: where its content waits, or 0
 * @zero_frames: destination frames that hold zeros: the first; each holds the address of the next
 * @reserve: pages that are set aside for the landing, likewise; no frame's destination
 * @copies: frames that wait, and their destinations
 * @zeros: destinations that become zeros after those copies
 */
struct mercury_places {
	struct mercury_plan plan;
	bool again;
	unsigned long *loaded, *empty;
	u64 loaded_count;
	u64 *waiting;
	u64 zero_frames, reserve;
	struct mercury_copies copies, zeros;
};

/* landing.c */
u32 mercury_plan_count(struct mercury_plan *plan, u64 limit);
bool mercury_plan_occupy(struct mercury_plan *plan, u64 start, u64 end);
u64 mercury_plan_occupied_number(const struct mercury_plan *plan, u64 phys);
u64 mercury_plan_number(const struct mercury_plan *plan, u64 phys);
u64 mercury_plan_unused_page(struct mercury_plan *plan);
u64 mercury_plan_stretch_end(const struct mercury_plan *plan, u32 *next);
u64 mercury_plan_aside(const struct mercury_plan *plan);
bool mercury_plan_has_room(const struct mercury_plan *plan, u64 aside);
u32 mercury_plan_windows(const struct mercury_plan *plan, u32 (*add)(u64 start, u64 end));

/* places.c */
u32 mercury_places_begin(struct mercury_places *places);
u64 mercury_places_reserved(struct mercury_places *places);
u32 mercury_places_load(struct mercury_places *places, const struct mercury_load_entry *entry, void **page);
void mercury_places_loaded(struct mercury_places *places, u64 phys);
void *mercury_places_content(const struct mercury_places *places, u64 phys);
u64 mercury_places_finish(struct mercury_places *places);
u32 mercury_places_map(struct mercury_places *places, u64 *root, int top, u64 resume_virt,
		       const u64 resume_phys[2]);

/* restore.c */
void *mercury_restore_virt(u64 phys);

#endif /* MERCURY_LANDING_H */
