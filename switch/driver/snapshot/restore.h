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
 * struct mercury_restore - a machine that is being restored
 * @places: the frames of the image
 * @ranges: the ranges of the plan; NULL: nothing is being restored
 * @cpus: the CPUs of the image
 * @cpu_count: their number
 * @resume_virt: the address at which the CPUs go on
 * @resume_phys: the two pages of text there, the second of which may be missing
 * @windows: the image's memory that this kernel does not occupy, ascending
 * @window_count: the number of windows
 * @root: the tables with which the CPUs leave this kernel
 * @landing: the page of struct mercury_landing; 0: nothing has been prepared
 * @code: the page of the landing's code
 */
struct mercury_restore {
	struct mercury_places places;
	struct mercury_restart_range *ranges;
	struct mercury_restart_cpu *cpus;
	u32 cpu_count;
	u64 resume_virt, resume_phys[2];
	struct mercury_window *windows;
	unsigned int window_count;
	struct page *root;
	phys_addr_t landing, code;
};

/* restore.c */
extern struct mercury_restore mercury_restore;
int mercury_restore_slot(u32 apic_id);
void mercury_restore_quiet_devices(void);

#endif /* MERCURY_RESTORE_H */
