//! Services that are watched: programs that send heartbeats, and units of systemd.
//!
//! * [`rules`]: the section of the file; [`heartbeat`]: sockets and the protocol; [`units`]: systemd's units.

pub mod heartbeat;
pub mod rules;
pub mod units;

use super::sensors::tools::{Tool, find};
use heartbeat::{Change, Ear};
use mercury_control::sysroot::Sysroot;
use rules::Service;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::{
    io,
    sync::{
        Arc, Mutex,
        mpsc::{Receiver, RecvTimeoutError, Sender, channel},
    },
    thread,
    time::{Duration, Instant},
};
use units::Watched;

/// Time between two looks at heartbeats without a message.
const TURN: Timespec = Timespec { tv_sec: 0, tv_nsec: 200_000_000 };
/// Time at most that a turn counts for. A daemon that stood still (a move, a snapshot, a stopped machine)
/// has not heard, and nobody could have sent.
const TURN_MAX: Duration = Duration::from_secs(1);
/// Pause after a turn. A program that sends without end costs a part of one CPU.
const PAUSE: Duration = Duration::from_millis(50);
/// News that are kept at most, beside the last change of each service.
const NEWS_MAX: usize = 4096;
/// Time between two questions to systemd.
const INTERVAL: Duration = Duration::from_secs(10);
/// Time for systemd to answer, and time in which it is not asked again after a silence.
const SYSTEMD: (Duration, Duration) = (Duration::from_secs(20), Duration::from_secs(600));

/// News of a service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum News {
    /// A change of the service with this index in the rules.
    Service(usize, Change),
    /// Something that keeps services from being watched.
    Blind(String),
}

/// The states of all services in words, by their index in the rules.
type States = Arc<Mutex<Vec<String>>>;

/// News that nobody has taken yet, with the last change of each service only: nobody takes them during a
/// move.
#[derive(Clone, Debug, Default)]
struct Board(Arc<Mutex<Vec<News>>>);

impl Board {
    fn put(&self, news: News) {
        let Ok(mut board) = self.0.lock() else { return };
        let is_change = matches!(news, News::Service(_, Change::Up | Change::Down(_)));
        if let News::Service(index, Change::Up | Change::Down(_)) = news {
            board.retain(
                |old| !matches!(old, News::Service(old, Change::Up | Change::Down(_)) if *old == index),
            );
        }
        if is_change || board.len() < NEWS_MAX {
            board.push(news);
        }
    }

    fn take(&self) -> Vec<News> {
        self.0.lock().map(|mut board| std::mem::take(&mut *board)).unwrap_or_default()
    }
}

/// The services of the rules.
#[derive(Debug)]
pub struct Ward {
    news: Board,
    states: States,
    /// Their end ends the threads.
    _go_on: Vec<Sender<()>>,
    services: Vec<Service>,
    sysroot: Sysroot,
}

impl Ward {
    /// Opens the sockets, and starts to watch.
    #[must_use]
    pub fn begin(sysroot: &Sysroot, services: &[Service]) -> Self {
        let news = Board::default();
        let states: States = Arc::new(Mutex::new(vec!["unknown".to_owned(); services.len()]));
        let mut ears = Vec::new();
        let mut units = Vec::new();
        for (index, service) in services.iter().enumerate() {
            match Ear::open(sysroot, service) {
                Ok(Some(ear)) => ears.push((index, ear)),
                Ok(None) => units.push((index, service.target().name().to_owned(), service.patience())),
                Err(error) => {
                    let text = format!("service {}: {error}", service.target().name());
                    news.put(News::Blind(text));
                }
            }
        }
        let mut go_on = Vec::new();
        if !ears.is_empty() {
            let (said, states) = (news.clone(), Arc::clone(&states));
            go_on.push(start("heartbeats", move |ends| listen(&mut ears, &said, &states, ends)));
        }
        match find(sysroot, "systemctl") {
            _ if units.is_empty() => {}
            None => news.put(News::Blind("there is no systemctl, so no unit is watched".into())),
            Some(path) => {
                let tool = Tool::new(path).with(SYSTEMD.0, SYSTEMD.1);
                let (said, states) = (news.clone(), Arc::clone(&states));
                go_on.push(start("units", move |ends| ask(tool, units, &said, &states, ends)));
            }
        }
        let go_on = go_on.into_iter().flatten().collect();
        Self { news, states, _go_on: go_on, services: services.to_vec(), sysroot: sysroot.clone() }
    }

    /// Takes the news since.
    pub fn look(&self) -> Vec<News> {
        self.news.take()
    }

    /// Returns each service with its state in words.
    #[must_use]
    pub fn state(&self) -> Vec<(String, String)> {
        let states = self.states.lock().map(|states| states.clone()).unwrap_or_default();
        let names = self.services.iter().map(|service| service.target().name().to_owned());
        names.zip(states).collect()
    }
}

impl Drop for Ward {
    fn drop(&mut self) {
        heartbeat::remove(&self.sysroot, &self.services);
    }
}

fn start(name: &str, work: impl FnOnce(&Receiver<()>) + Send + 'static) -> Option<Sender<()>> {
    let (go_on, ends) = channel();
    thread::Builder::new().name(name.to_owned()).spawn(move || work(&ends)).ok().map(|_| go_on)
}

fn put(states: &States, index: usize, text: &str) {
    if let Ok(mut states) = states.lock()
        && let Some(state) = states.get_mut(index)
        && state != text
    {
        text.clone_into(state);
    }
}

/// Listens for heartbeats until the daemon's end is gone.
fn listen(ears: &mut [(usize, Ear)], said: &Board, states: &States, ends: &Receiver<()>) {
    let mut before = Instant::now();
    while !matches!(ends.try_recv(), Err(std::sync::mpsc::TryRecvError::Disconnected)) {
        let mut ready: Vec<_> = ears.iter().map(|(_, ear)| PollFd::new(&ear.socket, PollFlags::IN)).collect();
        let _ = poll(&mut ready, Some(&TURN));
        drop(ready);
        let time = before.elapsed().min(TURN_MAX);
        before = Instant::now();
        for (index, ear) in ears.iter_mut() {
            for change in ear.turn(time) {
                said.put(News::Service(*index, change));
            }
            put(states, *index, ear.pulse.state());
        }
        thread::sleep(PAUSE);
    }
}

/// Asks systemd until the daemon's end is gone.
fn ask(
    mut tool: Tool,
    units: Vec<(usize, String, Duration)>,
    said: &Board,
    states: &States,
    ends: &Receiver<()>,
) {
    let names: Vec<_> = units.iter().map(|(_, name, _)| name.as_str()).collect();
    let arguments = [&["show", units::PROPERTIES, "--"], &names[..]].concat();
    let mut watched: Vec<_> =
        units.iter().map(|(index, _, patience)| (*index, Watched::new(*patience))).collect();
    let mut is_blind = false;
    loop {
        match shown(&mut tool, &arguments, watched.len()) {
            Ok(found) => {
                is_blind = false;
                for ((index, watched), unit) in watched.iter_mut().zip(&found) {
                    if let Some(change) = watched.compare(unit, INTERVAL) {
                        said.put(News::Service(*index, change));
                    }
                    put(states, *index, watched.state());
                }
            }
            Err(error) => {
                if !std::mem::replace(&mut is_blind, true) {
                    said.put(News::Blind(format!("systemd does not say how units are: {error}")));
                }
                watched.iter().for_each(|(index, _)| put(states, *index, "unknown"));
            }
        }
        if !matches!(ends.recv_timeout(INTERVAL), Err(RecvTimeoutError::Timeout)) {
            return;
        }
    }
}

fn shown(tool: &mut Tool, arguments: &[&str], count: usize) -> io::Result<Vec<units::Unit>> {
    let output = tool.ask(arguments)?;
    let found = units::parse(&String::from_utf8_lossy(&output.stdout));
    match found.len() == count {
        true => Ok(found),
        false => Err(io::Error::other(super::sensors::printable(&String::from_utf8_lossy(&output.stderr)))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::guard::{rules::Rules, sensors::testing::Fake};
    use std::os::unix::net::UnixDatagram;

    fn news(ward: &Ward) -> Vec<News> {
        for _ in 0..300 {
            let news = ward.look();
            if !news.is_empty() {
                return news;
            }
            thread::sleep(Duration::from_millis(20));
        }
        panic!("no news");
    }

    fn ward(fake: &Fake, text: &str) -> Ward {
        Ward::begin(&fake.sysroot(), &Rules::parse(text).expect("rules").services)
    }

    #[test]
    fn a_program_that_falls_silent_is_reported() {
        let fake = Fake::new();
        let ward = ward(&fake, "[[service]]\nname = 'other'\n[[service]]\nname = 'solver'\npatience_s = 1");
        let socket = fake.sysroot().path("run/mercury-notify/solver");
        let client = UnixDatagram::unbound().expect("a socket");
        client.send_to(b"READY=1", &socket).expect("sent");
        let down = News::Service(1, Change::Down("no heartbeat for 1 s".into()));
        assert_eq!(news(&ward), [down]);
        assert_eq!(ward.state()[1], ("solver".to_owned(), "down".to_owned()));
        client.send_to(b"WATCHDOG=1", &socket).expect("sent");
        assert_eq!(news(&ward), [News::Service(1, Change::Up)]);
        drop(ward);
        assert!(!socket.exists());
    }

    #[test]
    fn news_that_nobody_takes_do_not_pile_up() {
        let board = Board::default();
        board.put(News::Blind("x".into()));
        for number in 0..10_000 {
            board.put(News::Service(1, Change::Down(number.to_string())));
            board.put(News::Service(1, Change::Up));
            board.put(News::Service(2, Change::Down(number.to_string())));
        }
        let last = [
            News::Blind("x".into()),
            News::Service(1, Change::Up),
            News::Service(2, Change::Down("9999".into())),
        ];
        assert_eq!(board.take(), last);
        (0..10_000).for_each(|_| board.put(News::Service(1, Change::Note(String::new()))));
        assert_eq!(board.take().len(), NEWS_MAX);
    }

    #[test]
    fn units_are_asked_for_together() {
        let fake = Fake::new();
        fake.program(
            "systemctl",
            "echo \"$*\" > \"$(dirname \"$0\")/asked\"
            printf 'LoadState=loaded\\nActiveState=active\\nSubState=running\\n\\n'
            printf 'LoadState=loaded\\nActiveState=failed\\nSubState=failed\\nResult=timeout\\n'",
        );
        let ward = ward(&fake, "[[service]]\nunit = 'a.service'\n[[service]]\nunit = 'b.service'");
        let noted = Change::Note("its unit has failed (result timeout) before it was watched".into());
        assert_eq!(news(&ward), [News::Service(1, noted)]);
        let asked =
            "show --property=LoadState,ActiveState,SubState,Result,NRestarts,Type -- a.service b.service\n";
        assert_eq!(fake.text("usr/sbin/asked"), asked);
        let states: Vec<_> = ward.state().into_iter().map(|(_, state)| state).collect();
        assert_eq!(states, ["active (running)", "failed (failed)"]);
    }

    #[test]
    fn what_cannot_be_watched_is_said() {
        let fake = Fake::new();
        fake.program("systemctl", "echo Failed to connect to bus >&2; exit 1");
        let text = "[[service]]\nunit = 'a.service'\n[[service]]\nname = 'b'\nuser = 'nobody-here'";
        let ward = ward(&fake, text);
        let mut said = Vec::new();
        while said.len() < 2 {
            said.extend(news(&ward));
        }
        let has =
            |words: &str| said.iter().any(|news| matches!(news, News::Blind(text) if text.contains(words)));
        assert!(has("Failed to connect to bus") && has("nobody-here"), "{said:?}");
        let ward = Ward::begin(
            &Fake::new().sysroot(),
            &Rules::parse("[[service]]\nunit = 'a'").expect("rules").services,
        );
        assert!(matches!(&news(&ward)[..], [News::Blind(text)] if text.contains("no systemctl")));
    }
}
