// SPDX-License-Identifier: GPL-2.0-only
#include "judge.h"

/* Adds a sample. Returns for how long the CPU has been frozen with interrupts off, in milliseconds. */
u64 mercury_pulse_add(struct mercury_pulse *pulse, const struct mercury_sample *sample)
{
	if (!sample->irqs_off || sample->excused || sample->beats != pulse->beats ||
	    sample->now_ms < pulse->since_ms) {
		pulse->since_ms = sample->now_ms;
		pulse->beats = sample->beats;
		pulse->samples = 0;
		return 0;
	}
	pulse->samples++;
	return sample->now_ms - pulse->since_ms;
}

bool mercury_pulse_is_dead(const struct mercury_pulse *pulse, u64 frozen_ms, u32 patience_ms)
{
	return pulse->samples >= MERCURY_SAMPLES_MIN && frozen_ms >= patience_ms;
}

/*
 * Returns true for a CPU that neither answers NMIs nor has heartbeats: it may be in a handler of NMIs that
 * never ends. @tick is the number of NMIs so far. @answered and @beat are the numbers at the CPU's last
 * answer and at its last heartbeat. Counting NMIs, not time, a pause of the whole machine condemns no CPU.
 */
bool mercury_is_silent(u32 tick, u32 answered, u32 beat)
{
	return (s32)(tick - answered) >= MERCURY_UNANSWERED_MAX &&
	       (s32)(tick - beat) >= MERCURY_UNANSWERED_MAX;
}
