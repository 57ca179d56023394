//! Escalation in a thread of its own: the post-mortem is read, and the cause of the deaths is avoided.
//!
//! A module that is removed waits for its own exit function, and a device that is unbound for its driver.
//! Both may wait for ever in a kernel that has died twice. The daemon goes on meanwhile.

use super::{
    avoid::{self, Step},
    keeper::Event,
    rules::Rules,
};
use crate::postmortem;
use mercury_control::{error::Result, exit::Exit, sysroot::Sysroot};
use std::{
    io,
    sync::mpsc::{Receiver, TryRecvError, channel},
    thread,
    time::{Duration, Instant},
};

/// Time after which an act counts as failed, and the machine moves if it is to move.
const PATIENCE: Duration = Duration::from_secs(30);

/// Time between two attempts to read the post-mortem while another command controls the driver.
const RETRY: Duration = Duration::from_secs(2);
/// Such attempts: a minute of them.
const RETRIES: u32 = 30;

/// An escalation under way.
#[derive(Debug)]
pub struct Escalation {
    said: Receiver<Step>,
    begun: Instant,
    is_late: bool,
    /// Reason to move this machine, as soon as the act has ended or is late.
    order: Option<String>,
}

/// News of an escalation.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct News {
    pub events: Vec<Event>,
    /// Reason if this machine is to move now.
    pub order: Option<String>,
    pub has_ended: bool,
}

impl Escalation {
    /// Starts to read what the last life died of, and to avoid that. The machine has died of the same `same`
    /// times.
    ///
    /// # Errors
    ///
    /// Returns an error if the system has no thread.
    pub fn begin(rules: &Rules, same: u64) -> io::Result<Self> {
        let (avoid, is_dry) = (rules.avoid, rules.dry_run);
        Self::with(move |say| match while_busy(postmortem::report, RETRY) {
            Ok(report) => avoid::avoid(avoid, is_dry, &report, &Sysroot::default(), say),
            Err(error) => avoid::without_report(avoid, is_dry, same, &error, say),
        })
    }

    fn with(work: impl FnOnce(&dyn Fn(Step)) + Send + 'static) -> io::Result<Self> {
        let (say, said) = channel();
        // A daemon that has ended listens no more.
        thread::Builder::new().spawn(move || work(&|step| say.send(step).unwrap_or_default()))?;
        Ok(Self { said, begun: Instant::now(), is_late: false, order: None })
    }

    /// Returns what is new, without waiting.
    pub fn news(&mut self, now: Instant) -> News {
        let mut news = News::default();
        while !news.has_ended {
            match self.said.try_recv() {
                Ok(Step::Tell(event)) => news.events.push(event),
                Ok(Step::Order(reason)) => self.order = Some(reason),
                Err(TryRecvError::Disconnected) => news.has_ended = true,
                Err(TryRecvError::Empty) => break,
            }
        }
        let is_late = !news.has_ended && now.saturating_duration_since(self.begun) >= PATIENCE;
        if is_late && !self.is_late {
            self.is_late = true;
            let text = format!("the cause of the last death is not avoided within {} s", PATIENCE.as_secs());
            news.events.push(Event::new(
                2,
                "not-avoided",
                text + ": the driver is busy, or the kernel does not end the act",
            ));
        }
        if news.has_ended || is_late {
            news.order = self.order.take();
        }
        news
    }
}

/// Reads again while another command controls the driver, [`RETRIES`] times.
fn while_busy<T>(read: impl Fn() -> Result<T>, pause: Duration) -> Result<T> {
    for _ in 0..RETRIES {
        match read() {
            Err(error) if error.exit == Exit::Busy => thread::sleep(pause),
            done => return done,
        }
    }
    read()
}

#[cfg(test)]
mod tests {
    use super::*;
    use mercury_control::error::Error;
    use std::cell::Cell;

    #[test]
    fn a_driver_that_is_busy_is_asked_again() {
        let tries = Cell::new(0);
        let read = |busy: u32, exit| {
            tries.set(0);
            let result = while_busy(
                || {
                    tries.set(tries.get() + 1);
                    if tries.get() > busy { Ok(7) } else { Err(Error::new(exit, "no")) }
                },
                Duration::ZERO,
            );
            (result.ok(), tries.get())
        };
        assert_eq!(read(3, Exit::Busy), (Some(7), 4));
        assert_eq!(read(u32::MAX, Exit::Busy), (None, RETRIES + 1));
        assert_eq!(read(3, Exit::State), (None, 1));
    }

    fn event(name: &'static str) -> Step {
        Step::Tell(Event::new(2, name, String::new()))
    }

    fn names(news: &News) -> Vec<&str> {
        news.events.iter().map(|event| event.name).collect()
    }

    #[test]
    fn an_act_that_never_ends_holds_neither_the_daemon_nor_the_order() {
        let ((finish, finished), (begin, acts)) = (channel::<()>(), channel::<()>());
        let mut escalation = Escalation::with(move |say| {
            say(Step::Order("it died twice".into()));
            let _ = begin.send(());
            let _ = finished.recv();
            say(event("avoided"));
        })
        .expect("a thread");
        acts.recv().expect("an act");
        let (begun, soon) = (escalation.begun, Duration::from_secs(1));
        assert_eq!(escalation.news(begun + soon), News::default(), "the act may end yet");
        let late = escalation.news(begun + PATIENCE);
        assert_eq!((names(&late), late.order.as_deref()), (vec!["not-avoided"], Some("it died twice")));
        assert_eq!(escalation.news(begun + PATIENCE + soon), News::default(), "it is said once");
        finish.send(()).expect("a thread that waits");
        let mut all = Vec::new();
        loop {
            let news = escalation.news(begun + PATIENCE + soon);
            assert_eq!(news.order, None);
            all.extend(names(&news).into_iter().map(str::to_owned));
            if news.has_ended {
                break;
            }
            thread::yield_now();
        }
        assert_eq!(all, ["avoided"], "the end is told all the same");
    }

    #[test]
    fn the_order_follows_the_act() {
        let mut escalation = Escalation::with(|say| {
            say(Step::Order("it died twice".into()));
            say(event("avoided"));
        })
        .expect("a thread");
        let (mut all, mut order) = (Vec::new(), None);
        loop {
            let news = escalation.news(escalation.begun);
            all.extend(names(&news).into_iter().map(str::to_owned));
            if news.has_ended {
                order = news.order.or(order);
                break;
            }
            assert_eq!(news.order, None);
        }
        assert_eq!((all, order.as_deref()), (vec!["avoided".to_owned()], Some("it died twice")));
    }
}
