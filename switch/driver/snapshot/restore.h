/* SPDX-License-Identifier: GPL-2.0-only */
/* A machine that is being restored: shared by restore.c, which loads it, and land.c, which goes on in it. */
#ifndef MERCURY_RESTORE_H
#define MERCURY_RESTORE_H

#include "landing.h"
#include "snapshot.h"

/**
 * struct mercury_window - memory beyond this kernel's, mapped
 * @start: its first byte
 * @end: the byte after its last
 * @virt: its address
 */
struct mercury_window {
	phys_addr_t start, end;
	void *virt;
};

/**
 * struct mercury_copies - pages of copies that the landing makes
 * @first: the newest page, which leads to the older ones
 * @virt: its address
 */
struct mercury_copies {
	phys_addr_t first;
	struct mercury_landing_list *virt;
};

/**
 * struct mercury_restore - a machine that is being restored
 * @plan: memory of the image and of this kernel
 * @ranges: the ranges of the plan; NULL: nothing is being restored
 * @cpus: the CPUs of the image
 * @cpu_count: their number
 * @resume_virt: the address at which the CPUs go on
 * @resume_phys: the two pages of text there, the second of which may be missing
 * @again: frames may be loaded again, and hold what they were loaded with last
 * @windows: the image's memory that this kernel does not occupy, ascending
 * @window_count: the number of windows
 * @loaded: by the number of a page of the image: it has been loaded
 * @loaded_count: the pages that have been loaded
 * @waiting: by the number of a page that this kernel occupies: where its content waits, or 0
 * @zero_frames: destination frames that hold zeros: the first; each holds the address of the next
 * @reserve: pages that are set aside for the landing, likewise; no frame's destination
 * @copies: frames that wait, and their destinations
 * @zeros: destinations that become zeros after those copies
 * @root: the tables with which the CPUs leave this kernel
 * @landing: the page of struct mercury_landing; 0: nothing has been prepared
 * @code: the page of the landing's code
 */
struct mercury_restore {
	struct mercury_plan plan;
	struct mercury_restart_range *ranges;
	struct mercury_restart_cpu *cpus;
	u32 cpu_count;
	u64 resume_virt, resume_phys[2];
	bool again;
	struct mercury_window *windows;
	unsigned int window_count;
	unsigned long *loaded;
	u64 loaded_count;
	u64 *waiting;
	phys_addr_t zero_frames;
	phys_addr_t reserve;
	struct mercury_copies copies, zeros;
	struct page *root;
	phys_addr_t landing, code;
};

/* restore.c */
extern struct mercury_restore mercury_restore;
void *mercury_restore_virt(phys_addr_t phys);
void *mercury_restore_content(phys_addr_t phys);
phys_addr_t mercury_restore_reserved(void);
int mercury_restore_slot(u32 apic_id);
void mercury_restore_quiet_devices(void);

#endif /* MERCURY_RESTORE_H */
