//! Decisions of the watch: which samples condemn a CPU.

use proptest::prelude::*;

/// `struct mercury_sample`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct Sample {
    now_ms: u64,
    beats: u64,
    irqs_off: bool,
    excused: bool,
}

/// `struct mercury_pulse`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
struct Pulse {
    since_ms: u64,
    beats: u64,
    samples: u32,
}

unsafe extern "C" {
    fn mercury_pulse_add(pulse: *mut Pulse, sample: *const Sample) -> u64;
    fn mercury_pulse_is_dead(pulse: *const Pulse, frozen_ms: u64, patience_ms: u32) -> bool;
    fn mercury_is_near(one: u64, other: u64, ms: u32) -> bool;
    fn mercury_is_silent(tick: u32, answered: u32, beat: u32) -> bool;
    fn mercury_timer_has_fired(now: u32, due: u32, period: u32) -> bool;
}

const PATIENCE_MS: u32 = 1100;
const PERIOD_MS: u64 = 300;
const SAMPLES_MIN: u64 = 3;

/// Adds a sample. Returns true if the CPU is condemned.
fn add(pulse: &mut Pulse, sample: Sample) -> bool {
    // SAFETY: both are references to structures of the driver's layout.
    unsafe {
        let frozen = mercury_pulse_add(pulse, &raw const sample);
        mercury_pulse_is_dead(pulse, frozen, PATIENCE_MS)
    }
}

fn silent(tick: u32, answered: u32, beat: u32) -> bool {
    // SAFETY: arithmetic on numbers.
    unsafe { mercury_is_silent(tick, answered, beat) }
}

fn fired(now: u32, due: u32, period: u32) -> bool {
    // SAFETY: arithmetic on numbers.
    unsafe { mercury_timer_has_fired(now, due, period) }
}

fn samples() -> impl Strategy<Value = Vec<Sample>> {
    let one = (0..2000u64, 0..3u64, any::<bool>(), prop::bool::weighted(0.1));
    prop::collection::vec(one, 1..60).prop_map(|steps| {
        let (mut now_ms, mut beats) = (0, 0);
        let sample = |(step, beat, irqs_off, excused): (u64, u64, bool, bool)| {
            now_ms += step;
            // Two of three samples see no new heartbeat.
            beats += beat / 2;
            Sample { now_ms, beats, irqs_off, excused }
        };
        steps.into_iter().map(sample).collect()
    })
}

/// Samples at the end of `all` that show a frozen CPU, and the sample before them.
fn frozen_end(all: &[Sample]) -> (Option<Sample>, u64) {
    let beats = all[all.len() - 1].beats;
    let is_frozen = |sample: &&Sample| sample.irqs_off && !sample.excused && sample.beats == beats;
    let count = all.iter().rev().take_while(is_frozen).count();
    (all.len().checked_sub(count + 1).map(|before| all[before]), count as u64)
}

proptest! {
    /// Nothing but three samples in a row with interrupts off, without a heartbeat, over the whole time.
    #[test]
    fn no_cpu_that_lives_is_condemned(all in samples()) {
        let mut pulse = Pulse::default();
        for (index, sample) in all.iter().enumerate() {
            if !add(&mut pulse, *sample) {
                continue;
            }
            let (_, count) = frozen_end(&all[..=index]);
            prop_assert!(count >= SAMPLES_MIN, "{:?}", &all[..=index]);
            prop_assert!(sample.now_ms >= u64::from(PATIENCE_MS));
        }
    }

    /// A timer has fired when it is due, a little early, and when its counter wraps around, not in between.
    #[test]
    fn a_timer_fires_when_due_and_at_the_wrap(
        due in any::<u32>(), period in 1000..100_000_000u32, at in 0..1000u32
    ) {
        let early = period / 16;
        // Parts of the time from the last setting to the early edge, without the edges.
        let waiting = u64::from(period - early - 2);
        let before = due.wrapping_sub(early + 1 + (waiting * u64::from(at) / 1000) as u32);
        let wraps = before.wrapping_add(early) < 2 * early;
        prop_assert_eq!(fired(before, due, period), wraps);
        prop_assert!(fired(due.wrapping_sub(early), due, period) && fired(due.wrapping_add(at), due, period));
        prop_assert!(fired(u32::MAX - early / 2, due, period) && fired(early / 2, due, period));
    }

    /// One heartbeat, one sample with interrupts on, or one excuse is enough for another second.
    #[test]
    fn a_sign_of_life_counts(all in samples(), sign in 0..3u32) {
        let mut pulse = Pulse::default();
        for sample in &all {
            add(&mut pulse, *sample);
        }
        let last = all[all.len() - 1];
        let mut sample = Sample { now_ms: last.now_ms + 1, irqs_off: true, excused: false, ..last };
        match sign {
            0 => sample.beats += 1,
            1 => sample.irqs_off = false,
            _ => sample.excused = true,
        }
        prop_assert!(!add(&mut pulse, sample));
        for step in 1..u64::from(PATIENCE_MS) / 100 {
            let now_ms = sample.now_ms + step * 100;
            let later = Sample { now_ms, excused: false, irqs_off: true, ..sample };
            prop_assert!(!add(&mut pulse, later));
        }
    }

    /// A CPU that hangs is condemned within two seconds of the watch's NMIs, whatever came before.
    #[test]
    fn a_hang_is_seen_in_time(all in samples(), phase in 0..PERIOD_MS) {
        let mut pulse = Pulse::default();
        for sample in &all {
            add(&mut pulse, *sample);
        }
        let last = all[all.len() - 1];
        let hangs_at = last.now_ms;
        let seen = (0..).map(|n| hangs_at + phase + n * PERIOD_MS).find(|now_ms| {
            let sample = Sample { now_ms: *now_ms, irqs_off: true, excused: false, ..last };
            add(&mut pulse, sample)
        });
        prop_assert!(seen.is_some_and(|seen| seen - hangs_at <= 2000), "{seen:?} {hangs_at}");
    }

    /// Whichever is the later one.
    #[test]
    fn times_are_near_if_they_are_not_far_apart(one: u64, apart in 0..3000u64, ms in 1..2000u32) {
        // SAFETY: arithmetic on numbers.
        let near = |one, other| unsafe { mercury_is_near(one, other, ms) };
        let other = one.saturating_add(apart);
        let is_near = other - one < u64::from(ms);
        prop_assert_eq!([near(one, other), near(other, one)], [is_near; 2], "{} {}", one, other);
    }

    /// Neither alone condemns: a CPU deep in an NMI has heartbeats soon, and one without timer answers.
    #[test]
    fn silence_is_no_answer_and_no_heartbeat(tick: u32, answered in 0..20u32, beat in 0..20u32) {
        let is_silent = silent(tick, tick.wrapping_sub(answered), tick.wrapping_sub(beat));
        prop_assert_eq!(is_silent, answered >= 6 && beat >= 6);
    }
}

#[test]
fn a_pause_of_the_whole_machine_condemns_nobody() {
    let mut pulse = Pulse::default();
    let sample = |now_ms, irqs_off| Sample { now_ms, beats: 7, irqs_off, excused: false };
    assert!(!add(&mut pulse, sample(1000, false)));
    // The machine stands still for ten seconds, and the first NMI strikes before the timer does.
    assert!(!add(&mut pulse, sample(11_000, true)));
    assert!(!add(&mut pulse, sample(11_001, true)));
    assert!(!add(&mut pulse, Sample { beats: 8, ..sample(11_300, true) }));
}

#[test]
fn a_clock_that_goes_back_begins_anew() {
    let mut pulse = Pulse::default();
    let sample = |now_ms| Sample { now_ms, beats: 7, irqs_off: true, excused: false };
    assert!(!add(&mut pulse, sample(90_000)));
    for now_ms in [5, 305, 605, 905] {
        assert!(!add(&mut pulse, sample(now_ms)), "{now_ms}");
    }
    assert!(add(&mut pulse, sample(1205)));
}
