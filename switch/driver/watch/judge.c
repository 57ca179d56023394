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
 * Returns true if two times are less than @ms apart. Clocks of CPUs differ a little, another CPU may note a
 * later time meanwhile, and a clock that begins anew leaves notes of a far future.
 */
bool mercury_is_near(u64 one, u64 other, u32 ms)
{
	return one - other < ms || other - one < ms;
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

/*
 * Returns true if a timer has fired that compares the counter with @due once in a @period. Some fire a
 * little early, by the rounding of an emulator for one. In 32-bit mode a timer fires also when the counter
 * wraps around (IA-PC HPET specification 1.0a, 2.3.9.2.1). A counter that is far off was set by the kernel,
 * in a resume, and the timer may fire at any time.
 */
bool mercury_timer_has_fired(u32 now, u32 due, u32 period)
{
	u32 early = period / MERCURY_EARLY;
	s32 late = now - due;

	return late >= -(s32)early || late <= -(s32)(2 * period) || now + early < 2 * early;
}
