//! Tests of the policy of rounds: with machines that write in many ways, and with numbers that no
//! machine has.

use std::time::Duration;

use mercury_migration::rounds::{Fixed, Limits, Next, Otherwise, Policy, Round, wait};
use proptest::prelude::*;

const PAGE: u64 = 4096;

fn fixed() -> Fixed {
    let ms = Duration::from_millis;
    Fixed { quiesce: ms(80), hand_over: ms(10), start: ms(60) }
}

/// A machine that writes to some of its pages, at a rate, and a link.
#[derive(Clone, Copy, Debug)]
struct Load {
    pages: u64,
    working_set: u64,
    writes_per_second: u64,
    link_bytes_per_second: u64,
}

/// Runs the policy to its end. Returns the last decision, the number of rounds, and the strongest
/// throttle.
fn run(limits: Limits, load: Load) -> (Next, u32, u8) {
    let mut policy = Policy::new(limits, fixed());
    let (mut to_send, mut held_back) = (load.pages, 0);
    loop {
        let bytes = to_send * PAGE;
        let busy = Duration::from_secs_f64(bytes as f64 / load.link_bytes_per_second as f64);
        let waited = wait(&limits, bytes, busy);
        let took = busy + waited;
        let writes = load.writes_per_second as f64 * f64::from(100 - held_back) / 100.0 * took.as_secs_f64();
        let dirty_pages = (writes as u64).min(load.working_set);
        let round = Round { bytes_sent: bytes, pages_sent: to_send, took, waited, dirty_pages };
        match policy.next(&round) {
            Next::Copy { throttle_percent } => held_back = throttle_percent,
            end => return (end, policy.rounds(), held_back),
        }
        to_send = dirty_pages;
    }
}

const QUIET: Load =
    Load { pages: 500_000, working_set: 100_000, writes_per_second: 2_000, link_bytes_per_second: 1 << 30 };

/// The dirty pages become fewer with every round, so the machine stops as soon as they fit, without
/// a throttle.
#[test]
fn a_quiet_machine_stops_soon() {
    let (end, rounds, held_back) = run(Limits::default(), QUIET);
    assert!(matches!(end, Next::Stop { downtime } if downtime < Duration::from_millis(500)), "{end:?}");
    assert!(rounds <= 3 && held_back == 0);
}

/// The machine writes faster than the link. Only a throttled load lets the move come to an end.
#[test]
fn a_busy_machine_is_held_back() {
    let busy = Load { writes_per_second: 400_000, working_set: 300_000, ..QUIET };
    let (end, _, held_back) = run(Limits::default(), busy);
    assert!(matches!(end, Next::Stop { downtime } if downtime <= Duration::from_millis(500)), "{end:?}");
    assert!(held_back >= 30, "{held_back}");
    let gentle = Limits { max_throttle_percent: 0, ..Limits::default() };
    let (end, rounds, held_back) = run(gentle, busy);
    assert!(matches!(end, Next::GiveUp { .. }) && held_back == 0 && rounds < 10, "{end:?} after {rounds}");
    let (end, ..) = run(Limits { otherwise: Otherwise::Stop, ..gentle }, busy);
    assert!(matches!(end, Next::Stop { downtime } if downtime > Duration::from_secs(1)), "{end:?}");
}

/// A load that needs the strongest allowed throttle gets it within the rounds of a move.
#[test]
fn the_load_is_held_back_in_time() {
    let busy = Load { writes_per_second: 600_000, working_set: 300_000, ..QUIET };
    let limits = Limits { max_throttle_percent: 75, ..Limits::default() };
    let (end, rounds, held_back) = run(limits, busy);
    assert!(matches!(end, Next::Stop { downtime } if downtime <= limits.max_downtime), "{end:?}");
    assert!(held_back == 75 && rounds <= 14, "{held_back} % after {rounds} rounds");
}

/// The part of the downtime that cannot be shortened exceeds the limit: no round helps.
#[test]
fn an_impossible_limit_is_given_up() {
    let limits = Limits { max_downtime: Duration::from_millis(100), ..Limits::default() };
    assert!(matches!(run(limits, QUIET).0, Next::GiveUp { .. }));
    assert!(matches!(run(limits, Load { writes_per_second: 0, ..QUIET }).0, Next::GiveUp { .. }));
}

/// The bandwidth limit makes rounds longer, but not the last one.
#[test]
fn the_limit_is_for_rounds() {
    let limits = Limits { max_bytes_per_second: Some(100 << 20), ..Limits::default() };
    assert_eq!(wait(&limits, 100 << 20, Duration::from_millis(400)), Duration::from_millis(600));
    assert_eq!(wait(&limits, 100 << 20, Duration::from_secs(2)), Duration::ZERO);
    assert_eq!(wait(&Limits::default(), u64::MAX, Duration::ZERO), Duration::ZERO);
    let second = Duration::from_secs(1);
    let sent = Round {
        bytes_sent: 25_600 * PAGE,
        pages_sent: 25_600,
        took: second,
        waited: second * 3 / 4,
        dirty_pages: 10_240,
    };
    let policy = Policy::new(limits, fixed());
    assert_eq!(policy.downtime(&sent), Duration::from_millis(100 + 150));
}

/// The first round is mostly zeros, and quick; the pages written then are not zeros.
#[test]
fn zeros_promise_nothing() {
    let round = Round {
        bytes_sent: 1 << 20,
        pages_sent: 1_000_000,
        took: Duration::from_millis(10),
        waited: Duration::ZERO,
        dirty_pages: 25_600,
    };
    let policy = Policy::new(Limits::default(), fixed());
    assert_eq!(policy.downtime(&round), Duration::from_millis(1000 + 150));
}

fn limits() -> impl Strategy<Value = Limits> {
    let parts = (any::<u32>(), any::<Option<u64>>(), any::<u8>(), 1..60_u32, any::<bool>());
    parts.prop_map(|(nanos, max_bytes_per_second, max_throttle_percent, max_rounds, give_up)| Limits {
        max_downtime: Duration::from_nanos(u64::from(nanos)),
        max_bytes_per_second,
        max_throttle_percent,
        max_rounds,
        otherwise: if give_up { Otherwise::GiveUp } else { Otherwise::Stop },
    })
}

fn duration() -> impl Strategy<Value = Duration> {
    prop_oneof![
        Just(Duration::ZERO),
        Just(Duration::MAX),
        any::<u64>().prop_map(Duration::from_nanos),
        (0..10_000_u64).prop_map(Duration::from_millis),
    ]
}

fn round() -> impl Strategy<Value = Round> {
    let count = || prop_oneof![Just(0), Just(u64::MAX), any::<u64>(), 0..10_000_u64];
    (count(), count(), duration(), duration(), count()).prop_map(
        |(bytes_sent, pages_sent, took, waited, dirty_pages)| Round {
            bytes_sent,
            pages_sent,
            took,
            waited,
            dirty_pages,
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 2000,
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    /// For any measurements the policy ends in time. It never stops above the limit if asked not
    /// to. It never throttles more than allowed, nor less than before.
    #[test]
    fn the_policy_ends_within_its_limits(
        limits in limits(),
        rounds in proptest::collection::vec(round(), 60),
    ) {
        let mut policy = Policy::new(limits, fixed());
        let mut held_back = 0;
        let mut ended = false;
        for (number, round) in rounds.iter().enumerate() {
            let expected = policy.downtime(round);
            match policy.next(round) {
                Next::Copy { throttle_percent } => {
                    prop_assert!(throttle_percent <= limits.max_throttle_percent && throttle_percent < 100);
                    prop_assert!(throttle_percent >= held_back);
                    prop_assert!(expected > limits.max_downtime, "it fits, and goes on");
                    held_back = throttle_percent;
                    continue;
                }
                Next::Stop { downtime } => {
                    prop_assert_eq!(downtime, expected);
                    let fits = downtime <= limits.max_downtime;
                    prop_assert!(fits || limits.otherwise == Otherwise::Stop);
                }
                Next::GiveUp { downtime } => {
                    prop_assert!(limits.otherwise == Otherwise::GiveUp && downtime > limits.max_downtime);
                }
            }
            prop_assert!(number < limits.max_rounds as usize);
            ended = true;
            break;
        }
        prop_assert!(ended, "it never ends");
    }

    /// The same holds for plausible machines.
    #[test]
    fn machines_come_to_an_end(limits in limits(), pages in 1..2_000_000_u64, share in 0..100_u64,
                               writes_per_second in 0..2_000_000_u64, megabytes in 1..2_000_u64) {
        let rate = limits.max_bytes_per_second.map(|rate| rate | 1 << 20);
        let limits = Limits { max_bytes_per_second: rate, ..limits };
        let load = Load {
            pages,
            working_set: pages * share / 100,
            writes_per_second,
            link_bytes_per_second: megabytes << 20,
        };
        let (end, rounds, _) = run(limits, load);
        let ended = !matches!(end, Next::Copy { .. });
        prop_assert!(ended && rounds <= limits.max_rounds);
    }

    /// More dirty pages never take less time.
    #[test]
    fn the_estimate_grows(round in round(), more in any::<u64>()) {
        let policy = Policy::new(Limits::default(), fixed());
        let longer = Round { dirty_pages: round.dirty_pages.saturating_add(more), ..round };
        prop_assert!(policy.downtime(&round) <= policy.downtime(&longer));
    }
}
