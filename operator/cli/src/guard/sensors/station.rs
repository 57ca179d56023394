//! The threads that read sensors, one for each sensor, and the daemon's end of them.

use super::{
    Reading, Sensor,
    judge::{Alarm, Judge},
    open,
    rules::{Kind, SensorRules},
};
use mercury_control::sysroot::Sysroot;
use std::{
    io,
    sync::mpsc::{Receiver, RecvTimeoutError, Sender, TryRecvError, channel},
    thread,
    time::{Duration, Instant},
};

/// Time after its interval within which a sensor must have been read. Programs that it asks have half a
/// minute each.
const PATIENCE: Duration = Duration::from_secs(180);

type Read = (Vec<Reading>, io::Result<()>);

/// A sensor's thread, from the daemon's side.
#[derive(Debug)]
struct Post {
    kind: Kind,
    interval: Duration,
    read: Receiver<Read>,
    /// Its end ends the thread.
    _go_on: Sender<()>,
    heard: Instant,
    /// The reason why it does not answer.
    silent: Option<String>,
}

/// News of the sensors.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum News {
    Alarm(Alarm),
    /// A sensor does not answer any more, and why.
    Silent(Kind, String),
    /// It answers again.
    Answers(Kind),
}

/// All sensors of this machine.
#[derive(Debug)]
pub struct Station {
    posts: Vec<Post>,
    pub judge: Judge,
}

impl Station {
    /// Opens the sensors that this machine has, and starts to read them.
    #[must_use]
    pub fn begin(sysroot: &Sysroot, rules: &SensorRules) -> Self {
        let sensors = rules.used.iter().filter_map(|kind| Some((*kind, open(*kind, sysroot, rules)?)));
        Self::of(sensors.collect(), rules)
    }

    fn of(sensors: Vec<(Kind, Box<dyn Sensor>)>, rules: &SensorRules) -> Self {
        let now = Instant::now();
        let start = |(kind, sensor): (Kind, Box<dyn Sensor>)| {
            let interval = rules.interval(kind);
            let (said, read) = channel();
            let (go_on, ends) = channel();
            let name = format!("sensor-{}", kind.name());
            let thread = move || watch(sensor, interval, &said, &ends);
            let silent = thread::Builder::new().name(name).spawn(thread).err();
            let silent = silent.map(|error| error.to_string());
            Post { kind, interval, read, _go_on: go_on, heard: now, silent }
        };
        let posts = sensors.into_iter().map(start).collect();
        Self { posts, judge: Judge::new(rules.clone()) }
    }

    /// Takes what the sensors have said since, and judges it.
    pub fn look(&mut self, now: Instant) -> Vec<News> {
        let mut news = Vec::new();
        for post in &mut self.posts {
            loop {
                match post.read.try_recv() {
                    Ok((readings, answer)) => {
                        post.heard = now;
                        news.extend(match answer {
                            Ok(()) => post.silent.take().map(|_| News::Answers(post.kind)),
                            Err(error) => post.is_silent(error.to_string()),
                        });
                        let alarms = readings.iter().filter_map(|one| self.judge.judge(post.kind, one, now));
                        news.extend(alarms.map(News::Alarm));
                    }
                    Err(TryRecvError::Empty) => break,
                    Err(TryRecvError::Disconnected) => {
                        news.extend(post.is_silent("its thread has crashed".into()));
                        break;
                    }
                }
            }
            if now.saturating_duration_since(post.heard) > post.interval + PATIENCE {
                news.extend(post.is_silent("it waits for the hardware".into()));
            }
        }
        news
    }

    /// Returns each sensor with the reason why it does not answer.
    pub fn state(&self) -> impl Iterator<Item = (Kind, Option<&str>)> {
        self.posts.iter().map(|post| (post.kind, post.silent.as_deref()))
    }
}

impl Post {
    fn is_silent(&mut self, why: String) -> Option<News> {
        let is_new = self.silent.is_none();
        self.silent = Some(why.clone());
        is_new.then_some(News::Silent(self.kind, why))
    }
}

/// Reads a sensor until the daemon's end is gone.
fn watch(mut sensor: Box<dyn Sensor>, interval: Duration, said: &Sender<Read>, ends: &Receiver<()>) {
    loop {
        let mut readings = Vec::new();
        let answer = sensor.read(&mut readings);
        let goes_on = said.send((readings, answer)).is_ok();
        if !goes_on || !matches!(ends.recv_timeout(interval), Err(RecvTimeoutError::Timeout)) {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Amount, rules::Signal, testing::Fake};
    use super::*;
    use crate::guard::rules::Rules;
    use std::sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    };

    /// A sensor that reads as its test says.
    struct Scripted<F>(F);

    impl<F: FnMut() -> Read + Send> Sensor for Scripted<F> {
        fn read(&mut self, to: &mut Vec<Reading>) -> io::Result<()> {
            let (readings, answer) = (self.0)();
            to.extend(readings);
            answer
        }
    }

    fn rules(text: &str) -> SensorRules {
        Rules::parse(text).expect("rules").sensors
    }

    fn station(rules: &SensorRules, read: impl FnMut() -> Read + Send + 'static) -> Station {
        Station::of(vec![(Kind::Hwmon, Box::new(Scripted(read)))], rules)
    }

    /// Looks until there is news.
    fn news(station: &mut Station) -> Vec<News> {
        for _ in 0..200 {
            let news = station.look(Instant::now());
            if !news.is_empty() {
                return news;
            }
            thread::sleep(Duration::from_millis(20));
        }
        panic!("no news");
    }

    fn one() -> Reading {
        Reading::new(Signal::Uncorrected, "x", Amount::New(1), "a part")
    }

    #[test]
    fn an_alarm_arrives() {
        let mut station = station(&rules("[sensors]\ninterval_s = 1"), || (vec![one()], Ok(())));
        assert!(matches!(&news(&mut station)[..], [News::Alarm(alarm)] if alarm.source == "x"));
        assert_eq!(station.state().collect::<Vec<_>>(), [(Kind::Hwmon, None)]);
    }

    #[test]
    fn a_sensor_that_fails_is_named_once_and_again_when_it_answers() {
        let works = Arc::new(AtomicBool::new(false));
        let sees = Arc::clone(&works);
        let read = move || match sees.load(Ordering::Relaxed) {
            true => (vec![], Ok(())),
            false => (vec![], Err(io::Error::other("no answer"))),
        };
        let mut station = station(&rules("[sensors]\ninterval_s = 1"), read);
        assert_eq!(news(&mut station), [News::Silent(Kind::Hwmon, "no answer".into())]);
        thread::sleep(Duration::from_millis(1200));
        assert_eq!(station.look(Instant::now()), []);
        assert_eq!(station.state().collect::<Vec<_>>(), [(Kind::Hwmon, Some("no answer"))]);
        works.store(true, Ordering::Relaxed);
        assert_eq!(news(&mut station), [News::Answers(Kind::Hwmon)]);
    }

    #[test]
    fn a_sensor_that_waits_is_noticed_and_disturbs_no_other() {
        let (go_on, waits) = channel::<()>();
        let waiting = Scripted(move || {
            let _ = waits.recv();
            (vec![], Ok(()))
        });
        let rules = rules("[sensors]\ninterval_s = 1");
        let sensors: Vec<(Kind, Box<dyn Sensor>)> = vec![
            (Kind::Traces, Box::new(waiting)),
            (Kind::Hwmon, Box::new(Scripted(|| (vec![one()], Ok(()))))),
        ];
        let mut station = Station::of(sensors, &rules);
        assert!(matches!(&news(&mut station)[..], [News::Alarm(_)]));
        let later = Instant::now() + PATIENCE + Duration::from_secs(5);
        let said = station.look(later);
        assert!(said.contains(&News::Silent(Kind::Traces, "it waits for the hardware".into())), "{said:?}");
        drop(go_on);
    }

    #[test]
    fn the_threads_end_with_the_station() {
        let alive = Arc::new(());
        let held = Arc::clone(&alive);
        let station = station(&rules(""), move || {
            let _ = &held;
            (vec![], Ok(()))
        });
        assert_eq!(Arc::strong_count(&alive), 2);
        drop(station);
        for _ in 0..100 {
            if Arc::strong_count(&alive) == 1 {
                return;
            }
            thread::sleep(Duration::from_millis(20));
        }
        panic!("the thread goes on");
    }

    #[test]
    fn only_sensors_that_are_there_are_read() {
        let fake = Fake::new();
        fake.put("sys/class/hwmon/hwmon0/temp1_alarm", "0");
        let kinds = |text: &str| {
            let station = Station::begin(&fake.sysroot(), &rules(text));
            station.state().map(|(kind, _)| kind).collect::<Vec<_>>()
        };
        assert_eq!(kinds(""), [Kind::Hwmon]);
        assert_eq!(kinds("[sensors]\nuse = ['traces']"), []);
    }
}
