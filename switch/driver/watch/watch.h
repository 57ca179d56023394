/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * The watch: notices CPUs that hang, without the help of the CPUs that hang.
 *
 *	watch.c		heartbeats, samples, and the alarm
 *	hpet.c		the independent tier: a comparator of the HPET that sends NMIs
 *	judge.c		decisions on samples
 *	mend.c		the kernel's code and constants, mended
 *
 * A CPU has a heartbeat: a timer of its own. NMIs sample each CPU. A CPU with interrupts off whose heart
 * has not beaten for a second hangs. The watch needs no hypervisor; it uses a kept snapshot if there is one.
 */
#ifndef MERCURY_WATCH_H
#define MERCURY_WATCH_H

#include <linux/compiler.h>
#include <linux/types.h>

#include "judge.h"

/* The time between two heartbeats of a CPU, and between two NMIs. */
#define MERCURY_WATCH_PERIOD_MS	300

/* watch.c: under mercury.lock */
struct mercury_watch_request;
int mercury_watch_set(const struct mercury_watch_request *request);
void mercury_watch_status(struct mercury_watch_request *request);
void mercury_watch_stop(void);

/* watch.c: in any context */
void mercury_watch_return(void);
bool mercury_watch_is_on(void);

/* hpet.c: from mercury_hpet_resume() on in any context */
u32 mercury_hpet_start(void);
void mercury_hpet_stop(void);
void mercury_hpet_resume(void);
u32 mercury_hpet_tick(bool *first);
u32 mercury_hpet_ticks(void);
bool mercury_hpet_mend(void);
bool mercury_hpet_silence(void);
void mercury_hpet_wait(void);

/* mend.c: under mercury.lock */
struct mercury_mend_request;
int mercury_mend(const struct mercury_mend_request *request);

#endif /* MERCURY_WATCH_H */
