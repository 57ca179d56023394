/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Decisions of the watch. They know nothing of the kernel, and are tested on the host (switch/driver-tests).
 */
#ifndef MERCURY_JUDGE_H
#define MERCURY_JUDGE_H

#include <linux/types.h>

/* The least number of samples that condemn a CPU: a pause of the whole machine is one sample. */
#define MERCURY_SAMPLES_MIN	3
/* A CPU that left so many NMIs unanswered, and had no heartbeat in that time, is condemned. */
#define MERCURY_UNANSWERED_MAX	6
/* The part of its period by which a timer may fire early. */
#define MERCURY_EARLY		16

/**
 * struct mercury_sample - a CPU at the time of an NMI
 * @now_ms: the time
 * @beats: the CPU's heartbeats so far
 * @irqs_off: the NMI has interrupted code that runs with interrupts off
 * @excused: the kernel or the driver says that this is no hang
 */
struct mercury_sample {
	u64 now_ms;
	u64 beats;
	bool irqs_off;
	bool excused;
};

/**
 * struct mercury_pulse - conclusions from a CPU's samples so far
 * @since_ms: the time of the last sample of a CPU that was well
 * @beats: the CPU's heartbeats at that time
 * @samples: the number of samples after that
 */
struct mercury_pulse {
	u64 since_ms;
	u64 beats;
	u32 samples;
};

u64 mercury_pulse_add(struct mercury_pulse *pulse, const struct mercury_sample *sample);
bool mercury_pulse_is_dead(const struct mercury_pulse *pulse, u64 frozen_ms, u32 patience_ms);
bool mercury_is_near(u64 one, u64 other, u32 ms);
bool mercury_is_silent(u32 tick, u32 answered, u32 beat);
bool mercury_timer_has_fired(u32 now, u32 due, u32 period);

#endif /* MERCURY_JUDGE_H */
