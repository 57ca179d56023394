//! Counts of sensors, and the limits that they pass.

use super::{
    Amount, Reading,
    rules::{Kind, Limit, SensorRules, Signal},
};
use std::{
    collections::{BTreeMap, VecDeque},
    time::{Duration, Instant},
};

/// Sources that are counted apart; more than a machine has.
const SOURCES_MAX: usize = 4096;
/// Amounts that a source keeps with their times.
const AMOUNTS_MAX: usize = 1024;

/// An alarm: a source has passed its signal's limit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Alarm {
    pub signal: Signal,
    pub source: String,
    /// Amount within the limit's time.
    pub amount: u64,
    pub text: String,
}

/// The history of one source.
#[derive(Debug, Default)]
struct Source {
    /// Counter or level at the last reading.
    value: Option<u64>,
    /// True while an alarm is on that was on at the first reading.
    is_stuck: bool,
    /// Amounts with their times, the oldest first.
    amounts: VecDeque<(Instant, u64)>,
    alarmed: Option<Instant>,
}

impl Source {
    /// Returns the amount that is new in a reading. The first value of a counter begins to count, and an
    /// alarm that was on from the first reading counts from the time when it has been off.
    fn news(&mut self, amount: Amount, is_first: bool) -> u64 {
        match amount {
            Amount::New(amount) => amount,
            Amount::Level(value) => {
                let before = self.value.replace(value).unwrap_or(value);
                value.saturating_sub(before)
            }
            Amount::Counter(value) => match self.value.replace(value) {
                // A counter that is lower than before has begun again.
                Some(before) => value.checked_sub(before).unwrap_or(value),
                None => 0,
            },
            Amount::Alarm(on) => {
                self.is_stuck = on && (is_first || self.is_stuck);
                u64::from(on && !self.is_stuck)
            }
        }
    }

    /// Adds an amount and returns the sum within the time.
    fn add(&mut self, amount: u64, within: Duration, now: Instant) -> u64 {
        let is_old = |(then, _): &(Instant, u64)| now.duration_since(*then) >= within;
        while self.amounts.front().is_some_and(is_old) {
            self.amounts.pop_front();
        }
        if amount != 0 {
            self.amounts.push_back((now, amount));
        }
        // Joined amounts count for a little longer.
        if self.amounts.len() > AMOUNTS_MAX
            && let Some((_, oldest)) = self.amounts.pop_front()
            && let Some((_, next)) = self.amounts.front_mut()
        {
            *next = next.saturating_add(oldest);
        }
        self.amounts.iter().fold(0, |sum, (_, amount)| sum.saturating_add(*amount))
    }
}

/// The judge of all readings.
#[derive(Debug)]
pub struct Judge {
    rules: SensorRules,
    sources: BTreeMap<(Signal, String), Source>,
    sums: BTreeMap<(Kind, Signal), Sums>,
}

/// Sums since the start of the daemon.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sums {
    /// Errors, or readings in alarm.
    pub amount: u64,
    /// Alarms: times that the limit was passed.
    pub alarms: u64,
}

impl Judge {
    #[must_use]
    pub fn new(rules: SensorRules) -> Self {
        Self { rules, sources: BTreeMap::new(), sums: BTreeMap::new() }
    }

    /// Judges a reading. An alarm that goes on is repeated after the limit's time.
    pub fn judge(&mut self, kind: Kind, reading: &Reading, now: Instant) -> Option<Alarm> {
        let limit = self.limit(kind, reading);
        let key = (reading.signal, reading.source.clone());
        let is_first = !self.sources.contains_key(&key);
        if is_first && self.sources.len() >= SOURCES_MAX {
            return None;
        }
        let source = self.sources.entry(key).or_default();
        let news = source.news(reading.amount, is_first);
        let amount = source.add(news, limit.within, now);
        let sums = self.sums.entry((kind, reading.signal)).or_default();
        sums.amount = sums.amount.saturating_add(news);
        let was_said = source.alarmed.is_some_and(|then| now.duration_since(then) < limit.within);
        if news == 0 || amount < limit.limit || was_said {
            return None;
        }
        source.alarmed = Some(now);
        sums.alarms += 1;
        Some(self.alarm(reading, amount, limit))
    }

    /// Returns the limit for a reading. Alarms are counted by readings, and no more of them can be too many
    /// than the sensor makes within the time.
    fn limit(&self, kind: Kind, reading: &Reading) -> Limit {
        let limit = self.rules.limit(reading.signal);
        if !matches!(reading.amount, Amount::Alarm(_)) {
            return limit;
        }
        let readings = limit.within.as_secs() / self.rules.interval(kind).as_secs().max(1);
        Limit { limit: limit.limit.min(readings.max(1)), ..limit }
    }

    fn alarm(&self, reading: &Reading, amount: u64, limit: Limit) -> Alarm {
        let text = format!(
            "{}: {}: {amount} within {} s, and {} is too many",
            reading.signal.name(),
            reading.text,
            limit.within.as_secs(),
            limit.limit
        );
        Alarm { signal: reading.signal, source: reading.source.clone(), amount, text }
    }

    /// Returns the sums of each sensor and signal that was read.
    pub fn sums(&self) -> impl Iterator<Item = (Kind, Signal, Sums)> {
        self.sums.iter().map(|((kind, signal), sums)| (*kind, *signal, *sums))
    }

    /// Returns the alarms of hwmon that were on from the first reading.
    #[must_use]
    pub fn stuck(&self) -> Vec<&str> {
        let stuck = self.sources.iter().filter(|(_, source)| source.is_stuck);
        stuck.map(|((_, source), _)| source.as_str()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::rules::Rules;
    use super::*;
    use proptest::prelude::*;

    fn judge(text: &str) -> Judge {
        Judge::new(Rules::parse(text).expect("rules").sensors)
    }

    fn reading(signal: Signal, amount: Amount) -> Reading {
        Reading { signal, source: "mc0".into(), amount, text: "DIMM A1".into() }
    }

    fn corrected(total: u64) -> Reading {
        reading(Signal::Corrected, Amount::Counter(total))
    }

    #[test]
    fn a_counter_alarms_by_its_growth_within_the_time() {
        let mut judge = judge("[sensors.limits]\ncorrected = { limit = 5, within_s = 100 }");
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        // Errors from before the start do not count.
        assert_eq!(judge.judge(Kind::Counters, &corrected(1000), at(0)), None);
        assert_eq!(judge.judge(Kind::Counters, &corrected(1004), at(10)), None);
        // The four are forgotten.
        assert_eq!(judge.judge(Kind::Counters, &corrected(1008), at(110)), None);
        let alarm = judge.judge(Kind::Counters, &corrected(1009), at(120)).expect("an alarm");
        assert_eq!((alarm.amount, alarm.source.as_str()), (5, "mc0"));
        assert!(alarm.text.contains("DIMM A1: 5 within 100 s, and 5 is too many"), "{}", alarm.text);
        // It is said once within the time, and again when it goes on.
        assert_eq!(judge.judge(Kind::Counters, &corrected(1020), at(130)), None);
        assert!(judge.judge(Kind::Counters, &corrected(1021), at(220)).is_some());
        let sums: Vec<_> = judge.sums().collect();
        assert_eq!(sums, [(Kind::Counters, Signal::Corrected, Sums { amount: 21, alarms: 2 })]);
    }

    #[test]
    fn a_counter_that_begins_again_does_not_underflow() {
        let mut judge = judge("");
        let now = Instant::now();
        judge.judge(Kind::Counters, &corrected(1000), now);
        assert_eq!(judge.judge(Kind::Counters, &corrected(3), now), None);
        assert!(judge.judge(Kind::Counters, &corrected(10), now).is_some_and(|alarm| alarm.amount == 10));
    }

    #[test]
    fn a_level_that_falls_is_no_growth() {
        let mut judge = judge("[sensors.limits]\ndisk-errors = { limit = 3 }");
        let now = Instant::now();
        let mut reads =
            |level| judge.judge(Kind::Disks, &reading(Signal::DiskErrors, Amount::Level(level)), now);
        assert!([100, 102, 90].into_iter().all(|level| reads(level).is_none()));
        assert!(reads(91).is_some_and(|alarm| alarm.amount == 3));
    }

    #[test]
    fn an_alarm_that_was_always_on_is_no_alarm() {
        let mut judge = judge("[sensors.limits]\nvoltage = { limit = 2 }");
        let now = Instant::now();
        let mut reads = |on| judge.judge(Kind::Counters, &reading(Signal::Voltage, Amount::Alarm(on)), now);
        assert!((0..9).all(|_| reads(true).is_none()));
        assert_eq!((reads(false), reads(true)), (None, None));
        assert!(reads(true).is_some());
        let mut other = judge;
        other.judge(Kind::Hwmon, &reading(Signal::Fan, Amount::Alarm(true)), now);
        assert_eq!(other.stuck(), ["mc0"]);
    }

    #[test]
    fn a_sensor_that_is_seldom_read_can_alarm() {
        let start = Instant::now();
        let at = |reading: u64| start + Duration::from_secs(1800 * reading);
        let hot = |on| reading(Signal::Temperature, Amount::Alarm(on));
        let mut judge = judge("");
        assert_eq!(judge.judge(Kind::Disks, &hot(false), at(0)), None);
        let alarm = judge.judge(Kind::Disks, &hot(true), at(1)).expect("an alarm");
        assert!(alarm.text.ends_with("1 within 600 s, and 1 is too many"), "{}", alarm.text);
        // A time in which it is read often enough keeps its limit.
        let mut judge = super::tests::judge("[sensors.limits]\ntemperature = { limit = 2, within_s = 7200 }");
        assert_eq!(judge.judge(Kind::Disks, &hot(false), at(0)), None);
        assert_eq!(judge.judge(Kind::Disks, &hot(true), at(1)), None);
        assert!(judge.judge(Kind::Disks, &hot(true), at(2)).is_some());
    }

    #[test]
    fn sources_are_counted_apart() {
        let mut judge = judge("[sensors.limits]\ncorrected = { limit = 2 }");
        let one =
            |source: &str| Reading { source: source.into(), ..reading(Signal::Corrected, Amount::New(1)) };
        let now = Instant::now();
        assert_eq!(
            (judge.judge(Kind::Counters, &one("a"), now), judge.judge(Kind::Counters, &one("b"), now)),
            (None, None)
        );
        assert!(judge.judge(Kind::Counters, &one("a"), now).is_some());
    }

    proptest! {
        /// An alarm comes if, and only if, the growth within the time reaches the limit and none came within
        /// that time.
        #[test]
        fn alarms_agree_with_a_sum_by_hand(steps in prop::collection::vec((0_u64..50, 0_u64..4), 1..60)) {
            let mut judge = judge("[sensors.limits]\ncorrected = { limit = 6, within_s = 60 }");
            let start = Instant::now();
            let (mut clock, mut total, mut last) = (0, 0, None::<u64>);
            let mut grown: Vec<(u64, u64)> = Vec::new();
            judge.judge(Kind::Counters, &corrected(0), start);
            for (wait, growth) in steps {
                clock += wait;
                total += growth;
                grown.push((clock, growth));
                let recent: u64 = grown.iter().filter(|(at, _)| clock - at < 60).map(|(_, n)| n).sum();
                let expected = growth != 0 && recent >= 6 && last.is_none_or(|last| clock - last >= 60);
                let now = start + Duration::from_secs(clock);
                let said = judge.judge(Kind::Counters, &corrected(total), now).is_some();
                prop_assert_eq!(said, expected);
                if said { last = Some(clock); }
            }
        }
    }
}
