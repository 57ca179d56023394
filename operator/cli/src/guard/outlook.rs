//! Sensors and services in mercuryd: what they say, as events and wishes.
//!
//! The decisions are here, and no action: [`super::keeper`] acts.

use super::{
    keeper::Event,
    report::{self, Report},
    rules::Rules,
    sensors::{
        judge::{Alarm, Judge},
        rules::{Action, Signal},
        station::{self, Station},
    },
    services::{self, Ward, heartbeat::Change, rules},
};
use mercury_abi::code::Code;
use mercury_control::sysroot::Sysroot;
use std::{
    collections::{BTreeMap, BTreeSet},
    time::Instant,
};

/// Something that the rules want to be done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Wish {
    Tell(Event),
    /// Run this program, with the event's name and text.
    Run(String, Event),
    /// Move this machine, for this reason.
    Evacuate(String),
    /// Go back to the snapshot, for this reason.
    Rollback(String),
    /// Keep another snapshot in the place of the one that is kept, for this reason.
    Renew(&'static str),
}

/// The sensors and services of a daemon.
#[derive(Debug)]
pub struct Outlook {
    sysroot: Sysroot,
    rules: Rules,
    station: Option<Station>,
    ward: Ward,
    down: BTreeSet<usize>,
    failures: BTreeMap<usize, u64>,
    ordered: Option<Instant>,
    /// An order that was not given, or that has failed.
    pending: Option<Pending>,
    /// The last order that was given.
    last: Option<Pending>,
    /// The counts of this hardware, while it is not read.
    judge: Option<Judge>,
    /// Alarms without a meaning that were reported.
    noted: BTreeSet<String>,
    /// Uncorrected errors of memory at the last look.
    broken: u64,
}

/// An order to move, and its cause.
#[derive(Clone, Debug)]
struct Pending {
    reason: String,
    cause: Cause,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Cause {
    /// An alarm. It is judged anew at this time.
    Alarm(Option<Instant>),
    /// A service, which may work again.
    Service(usize),
}

impl Pending {
    /// Returns true if the cause is still there.
    fn holds(&self, down: &BTreeSet<usize>, now: Instant) -> bool {
        match self.cause {
            Cause::Alarm(until) => until.is_none_or(|until| now < until),
            Cause::Service(index) => down.contains(&index),
        }
    }
}

impl Outlook {
    /// Opens sensors and sockets.
    #[must_use]
    pub fn begin(sysroot: &Sysroot, rules: &Rules) -> Self {
        Self {
            sysroot: sysroot.clone(),
            rules: rules.clone(),
            station: Some(Station::begin(sysroot, &rules.sensors)),
            ward: Ward::begin(sysroot, &rules.services),
            down: BTreeSet::new(),
            failures: BTreeMap::new(),
            ordered: None,
            pending: None,
            last: None,
            judge: None,
            noted: BTreeSet::new(),
            broken: 0,
        }
    }

    /// Stops reading the hardware, which this machine is about to leave.
    pub fn pause(&mut self) {
        self.judge = self.station.take().map(|station| station.judge);
    }

    /// Reads the hardware beneath from now on. What services have done meanwhile counts by its end.
    ///
    /// The counts go on if this machine has not moved. The order that has failed is given again later.
    pub fn resume(&mut self, has_moved: bool) {
        let mut station = Station::begin(&self.sysroot, &self.rules.sensors);
        let judge = self.judge.take();
        if has_moved {
            (self.last, self.pending) = (None, None);
            self.noted.clear();
        } else {
            station.judge = judge.unwrap_or(station.judge);
            self.has_failed();
        }
        self.station = Some(station);
    }

    /// Keeps the last order, which has failed, for later.
    pub fn has_failed(&mut self) {
        self.pending = self.last.take().or(self.pending.take());
    }

    /// Takes all news.
    pub fn look(&mut self, now: Instant) -> Vec<Wish> {
        let sensed = self.station.as_mut().map(|station| station.look(now)).unwrap_or_default();
        let mut wishes: Vec<_> = sensed.into_iter().flat_map(|news| self.sensed(news, now)).collect();
        for news in last_of_each(self.ward.look()) {
            wishes.extend(match news {
                services::News::Service(index, change) => self.served(index, change, now),
                services::News::Blind(text) => {
                    vec![Wish::Tell(Event::new(4, "service-unwatched", text).code(Code::ServiceSilent))]
                }
            });
        }
        wishes.extend(self.broken());
        wishes.extend(self.stuck());
        wishes.extend(self.pending(now));
        wishes
    }

    /// Returns the wish for another snapshot if memory has broken since. A rollback would read the broken
    /// frame, or give it to a program again. One error is enough, whatever the limit of an alarm.
    fn broken(&mut self) -> Option<Wish> {
        let is_read = self.rules.sensors.limit(Signal::Uncorrected).action != Action::Ignore;
        let sums = self.station.as_ref().filter(|_| is_read)?.judge.sums();
        let uncorrected = sums.filter(|(_, signal, _)| *signal == Signal::Uncorrected);
        let now = uncorrected.map(|(_, _, sums)| sums.amount).sum();
        let before = std::mem::replace(&mut self.broken, now);
        (now > before).then_some(Wish::Renew("memory has broken since the snapshot"))
    }

    /// Reports alarms that were on at the first reading: open inputs, or a part that fails already.
    fn stuck(&mut self) -> Vec<Wish> {
        let stuck = self.station.iter().flat_map(|station| station.judge.stuck());
        let new: Vec<_> = stuck.filter(|source| !self.noted.contains(*source)).map(str::to_owned).collect();
        self.noted.extend(new.iter().cloned());
        let note = |source: String| {
            let text = format!("{source} was in alarm at the first reading, and counts once it has been off");
            Wish::Tell(Event::new(4, "sensor-stuck", text).field("MERCURY_SOURCE", &source))
        };
        new.into_iter().map(note).collect()
    }

    /// Returns the wish to move that could not be carried out before.
    fn pending(&mut self, now: Instant) -> Option<Wish> {
        let is_early = self.is_early(now);
        self.pending = self.pending.take().filter(|pending| pending.holds(&self.down, now));
        let pending = self.pending.take_if(|_| !is_early)?;
        self.evacuate(pending, now)
    }

    fn is_early(&self, now: Instant) -> bool {
        let interval = self.rules.order_interval();
        self.ordered.is_some_and(|then| now.saturating_duration_since(then) < interval)
    }

    fn sensed(&mut self, news: station::News, now: Instant) -> Vec<Wish> {
        match news {
            station::News::Alarm(alarm) => self.alarmed(&alarm, now),
            station::News::Silent(kind, why) => {
                let text = format!("sensor {}: {why}", kind.name());
                let event = Event::new(4, "sensor-silent", text).code(Code::SensorSilent);
                vec![Wish::Tell(event.field("MERCURY_SENSOR", kind.name()))]
            }
            station::News::Answers(kind) => {
                let text = format!("sensor {} answers again", kind.name());
                let event = Event::new(6, "sensor-answers", text);
                vec![Wish::Tell(event.field("MERCURY_SENSOR", kind.name()))]
            }
        }
    }

    fn alarmed(&mut self, alarm: &Alarm, now: Instant) -> Vec<Wish> {
        let limit = self.rules.sensors.limit(alarm.signal);
        let action = limit.action;
        if action == Action::Ignore {
            return Vec::new();
        }
        let event = Event::new(2, "sensor-alarm", alarm.text.clone())
            .code(Code::SensorAlarm)
            .field("MERCURY_SIGNAL", alarm.signal.name())
            .field("MERCURY_SOURCE", &alarm.source)
            .field("MERCURY_AMOUNT", &alarm.amount.to_string());
        let mut wishes = vec![Wish::Tell(event)];
        if action == Action::Evacuate {
            let cause = Cause::Alarm(now.checked_add(limit.within));
            wishes.extend(self.evacuate(Pending { reason: alarm.text.clone(), cause }, now));
        }
        wishes
    }

    fn served(&mut self, index: usize, change: Change, now: Instant) -> Vec<Wish> {
        let Some(service) = self.rules.services.get(index).cloned() else { return Vec::new() };
        let name = service.target().name();
        let event = |priority, event, text| Event::new(priority, event, text).field("MERCURY_SERVICE", name);
        match change {
            Change::Up => {
                self.down.remove(&index);
                vec![Wish::Tell(event(6, "service-up", format!("service {name} works again")))]
            }
            Change::Note(text) => {
                vec![Wish::Tell(event(4, "service-note", format!("service {name}: {text}")))]
            }
            Change::Down(why) => {
                self.down.insert(index);
                *self.failures.entry(index).or_default() += 1;
                let text = format!("service {name}: {why}");
                let event = event(2, "service-down", text.clone()).code(Code::ServiceSilent);
                let hook = service.hook().map(|hook| Wish::Run(hook.to_owned(), event.clone()));
                let mut wishes: Vec<_> = hook.into_iter().chain([Wish::Tell(event)]).collect();
                wishes.extend(match service.action() {
                    rules::Action::Report => None,
                    rules::Action::Evacuate => {
                        self.evacuate(Pending { reason: text, cause: Cause::Service(index) }, now)
                    }
                    rules::Action::Rollback => Some(self.unless_dry("would-roll-back", Wish::Rollback(text))),
                });
                wishes
            }
        }
    }

    /// Returns the wish to move, unless the last one was a short time ago. Then it is given later.
    fn evacuate(&mut self, order: Pending, now: Instant) -> Option<Wish> {
        if self.is_early(now) {
            self.pending = Some(order);
            return None;
        }
        self.ordered = Some(now);
        let wish = self.unless_dry("would-evacuate", Wish::Evacuate(order.reason.clone()));
        self.last = Some(order);
        Some(wish)
    }

    /// Returns the wish, or an event in its place if the rules are only tried.
    fn unless_dry(&self, name: &'static str, wish: Wish) -> Wish {
        match (&wish, self.rules.dry_run) {
            (Wish::Evacuate(reason) | Wish::Rollback(reason), true) => {
                Wish::Tell(Event::new(4, name, format!("nothing is done, by dry_run: {reason}")))
            }
            _ => wish,
        }
    }

    /// Returns the state, for the file.
    #[must_use]
    pub fn report(&self) -> Report {
        let station = self.station.as_ref();
        let sensor =
            |(name, silent): (_, Option<&str>)| report::Sensor { name, silent: silent.map(str::to_owned) };
        let sum = |(sensor, signal, sums): (_, _, super::sensors::judge::Sums)| report::Sum {
            sensor,
            signal,
            amount: sums.amount,
            alarms: sums.alarms,
        };
        let service = |(index, (name, state))| report::Service {
            name,
            state,
            down: self.down.contains(&index),
            failures: self.failures.get(&index).copied().unwrap_or_default(),
        };
        let stuck = station.map(|station| station.judge.stuck()).unwrap_or_default();
        Report {
            pid: std::process::id(),
            sensors: station.into_iter().flat_map(Station::state).map(sensor).collect(),
            signals: station.into_iter().flat_map(|station| station.judge.sums()).map(sum).collect(),
            stuck: stuck.into_iter().map(str::to_owned).collect(),
            services: self.ward.state().into_iter().enumerate().map(service).collect(),
        }
    }
}

/// Returns the news with the last change of each service only. After a pause, a failure may be over.
fn last_of_each(news: Vec<services::News>) -> Vec<services::News> {
    let mut seen = BTreeSet::new();
    let is_last = |news: &services::News| match news {
        services::News::Service(index, Change::Up | Change::Down(_)) => seen.insert(*index),
        _ => true,
    };
    let mut last: Vec<_> = news.into_iter().rev().filter(is_last).collect();
    last.reverse();
    last
}

#[cfg(test)]
mod tests {
    use super::super::sensors::{Amount, Reading, rules::Kind, testing::Fake};
    use super::*;
    use std::{thread, time::Duration};

    fn outlook(text: &str) -> (Fake, Outlook) {
        let fake = Fake::new();
        let outlook = Outlook::begin(&fake.sysroot(), &Rules::parse(text).expect("rules"));
        (fake, outlook)
    }

    fn alarm(signal: Signal) -> station::News {
        station::News::Alarm(Alarm { signal, source: "mc0".into(), amount: 12, text: "DIMM A1".into() })
    }

    #[test]
    fn one_uncorrected_error_is_a_wish_for_another_snapshot() {
        let renewals = |rules: &str, amounts: &[u64]| {
            let (_fake, mut outlook) = outlook(rules);
            let mut wishes = Vec::new();
            for amount in amounts {
                let (signal, amount) = (Signal::Uncorrected, Amount::New(*amount));
                let reading = Reading { signal, source: "page".into(), amount, text: "a page".into() };
                let judge = &mut outlook.station.as_mut().expect("a station").judge;
                judge.judge(Kind::Traces, &reading, Instant::now());
                wishes.push(outlook.broken().is_some());
            }
            wishes
        };
        let many = "[sensors.limits]\nuncorrected = { limit = 10, within_s = 60 }";
        assert_eq!(renewals(many, &[1, 0, 0, 2]), [true, false, false, true], "before an alarm");
        let ignored = "[sensors.limits]\nuncorrected = { action = 'ignore' }";
        assert_eq!(renewals(ignored, &[1, 1]), [false; 2]);
    }

    fn told(wish: &Wish) -> (&str, Vec<&str>) {
        let Wish::Tell(event) = wish else { panic!("no event: {wish:?}") };
        (event.name, event.fields.iter().map(|(_, value)| value.as_str()).collect())
    }

    #[test]
    fn an_alarm_is_reported_and_moves_the_machine_only_by_a_rule() {
        let (_fake, mut outlook) =
            outlook("[sensors.limits]\ncorrected = { action = 'evacuate' }\nfan = { action = 'ignore' }");
        let now = Instant::now();
        let wishes = outlook.sensed(alarm(Signal::Pcie), now);
        assert_eq!(wishes.len(), 1);
        assert_eq!(told(&wishes[0]), ("sensor-alarm", vec!["sensor-alarm", "pcie", "mc0", "12"]));
        assert_eq!(outlook.sensed(alarm(Signal::Fan), now), []);
        let wishes = outlook.sensed(alarm(Signal::Corrected), now);
        assert_eq!(wishes[1], Wish::Evacuate("DIMM A1".into()));
        // The next order comes after its interval.
        assert_eq!(outlook.sensed(alarm(Signal::Corrected), now).len(), 1);
        assert_eq!(outlook.sensed(alarm(Signal::Corrected), now + Duration::from_secs(599)).len(), 1);
        assert_eq!(outlook.sensed(alarm(Signal::Corrected), now + Duration::from_secs(600)).len(), 2);
    }

    fn orders(outlook: &mut Outlook, now: Instant) -> Vec<String> {
        let wishes = outlook.look(now).into_iter();
        wishes
            .filter_map(|wish| if let Wish::Evacuate(reason) = wish { Some(reason) } else { None })
            .collect()
    }

    #[test]
    fn an_order_that_came_too_early_or_failed_is_given_later() {
        let (_fake, mut outlook) = outlook(
            "[sensors.limits]\nuncorrected = { action = 'evacuate' }\nfan = { action = 'evacuate' }\n\
            [[service]]\nname = 'b'\naction = 'evacuate'",
        );
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        assert_eq!(outlook.sensed(alarm(Signal::Fan), start).len(), 2);
        // It comes within the interval of the first order.
        assert_eq!(outlook.sensed(alarm(Signal::Uncorrected), at(100)).len(), 1);
        assert!(orders(&mut outlook, at(599)).is_empty());
        assert_eq!(orders(&mut outlook, at(600)), ["DIMM A1"]);
        assert!(orders(&mut outlook, at(1300)).is_empty());
        // This order fails.
        outlook.pause();
        outlook.resume(false);
        assert_eq!(orders(&mut outlook, at(1301)), ["DIMM A1"]);
        // A machine that has arrived has other parts.
        outlook.pause();
        outlook.resume(true);
        assert!(orders(&mut outlook, at(2000)).is_empty());
        // A service that works again, and an alarm that is to be judged anew, cause nothing.
        outlook.sensed(alarm(Signal::Uncorrected), at(3000));
        outlook.served(0, Change::Down("silent".into()), at(3001));
        outlook.served(0, Change::Up, at(3002));
        assert!(orders(&mut outlook, at(3700)).is_empty());
        outlook.sensed(alarm(Signal::Uncorrected), at(4000));
        outlook.sensed(alarm(Signal::Fan), at(4010));
        assert!(orders(&mut outlook, at(4610)).is_empty());
    }

    #[test]
    fn rules_can_be_tried() {
        let (_fake, mut outlook) = outlook(
            "dry_run = true\n[sensors.limits]\ncorrected = { action = 'evacuate' }\n\
            [[service]]\nname = 'solver'\naction = 'rollback'",
        );
        let now = Instant::now();
        assert_eq!(told(&outlook.sensed(alarm(Signal::Corrected), now)[1]).0, "would-evacuate");
        let wishes = outlook.served(0, Change::Down("silent".into()), now);
        assert_eq!(told(&wishes[1]).0, "would-roll-back");
    }

    #[test]
    fn a_service_that_fails_has_its_consequence() {
        let (_fake, mut outlook) = outlook(
            "[[service]]\nname = 'a'\naction = 'rollback'\nhook = '/bin/page'\n\
            [[service]]\nname = 'b'\naction = 'evacuate'",
        );
        let now = Instant::now();
        let wishes = outlook.served(0, Change::Down("silent".into()), now);
        let [Wish::Run(program, _), tell, Wish::Rollback(reason)] = &wishes[..] else { panic!("{wishes:?}") };
        assert_eq!((program.as_str(), reason.as_str()), ("/bin/page", "service a: silent"));
        assert_eq!(told(tell), ("service-down", vec!["a", "service-silent"]));
        let wishes = outlook.served(1, Change::Down("silent".into()), now);
        assert_eq!(wishes[1], Wish::Evacuate("service b: silent".into()));
        let state = |outlook: &Outlook| {
            outlook
                .report()
                .services
                .iter()
                .map(|service| (service.down, service.failures))
                .collect::<Vec<_>>()
        };
        assert_eq!(state(&outlook), [(true, 1), (true, 1)]);
        assert_eq!(told(&outlook.served(0, Change::Up, now)[0]).0, "service-up");
        assert_eq!(state(&outlook), [(false, 1), (true, 1)]);
    }

    #[test]
    fn after_a_pause_the_last_change_counts() {
        let news = |index, change| services::News::Service(index, change);
        let all = vec![
            news(0, Change::Down("x".into())),
            news(1, Change::Up),
            news(0, Change::Up),
            news(1, Change::Down("y".into())),
            services::News::Blind("z".into()),
        ];
        assert_eq!(last_of_each(all.clone()), all[2..]);
    }

    #[test]
    fn hardware_is_not_read_during_a_move() {
        let fake = Fake::new();
        fake.put("sys/class/hwmon/hwmon0/temp1_alarm", "0");
        let rules = Rules::parse("[sensors]\ninterval_s = 1\n[sensors.limits]\ntemperature = { limit = 1 }");
        let mut outlook = Outlook::begin(&fake.sysroot(), &rules.expect("rules"));
        let look = |outlook: &mut Outlook| {
            (0..30)
                .flat_map(|_| {
                    thread::sleep(Duration::from_millis(50));
                    outlook.look(Instant::now())
                })
                .collect::<Vec<_>>()
        };
        assert_eq!(look(&mut outlook), []);
        outlook.pause();
        fake.put("sys/class/hwmon/hwmon0/temp1_alarm", "1");
        assert_eq!((look(&mut outlook), outlook.report().sensors), (vec![], vec![]));
        // On the same hardware the counts go on: this alarm was off before.
        outlook.resume(false);
        assert_eq!(told(&look(&mut outlook)[0]).0, "sensor-alarm");
        assert_eq!(outlook.report().stuck, [""; 0]);
        // The hardware after a move may have alarms that are always on.
        outlook.pause();
        outlook.resume(true);
        let said = look(&mut outlook);
        assert_eq!(said.iter().map(|wish| told(wish).0).collect::<Vec<_>>(), ["sensor-stuck"]);
        assert_eq!(outlook.report().stuck, ["hwmon0/hwmon0/temp1_alarm"]);
        fake.put("sys/class/hwmon/hwmon0/temp1_alarm", "0");
        look(&mut outlook);
        fake.put("sys/class/hwmon/hwmon0/temp1_alarm", "1");
        assert_eq!(told(&look(&mut outlook)[0]).0, "sensor-alarm");
        let silent = report::Sensor { name: Kind::Hwmon, silent: None };
        assert_eq!(outlook.report().sensors, [silent]);
    }
}
