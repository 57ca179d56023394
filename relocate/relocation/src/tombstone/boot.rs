//! The start of a system, in its initial RAM disk, before it touches any disk of its own or the
//! network. If its hardware has a tombstone, the system may run elsewhere, and does not start here.
//! The operator at the console is told of its place, and may decide otherwise. Without an operator
//! the machine powers off in the end. Switched on again, it says the same.

use super::{Place, Record, State, all, clear, initramfs, spots};
use crate::operator::Operator;
use mercury_control::{exit::Exit, sysroot::Sysroot};
use std::{
    thread,
    time::{Duration, Instant},
};

/// Word on the kernel's command line: the wish about a tombstone.
const WORD: &str = "mercury.tombstone=";
/// Time for a disk that may have a tombstone to appear.
const DISK_PATIENCE: Duration = Duration::from_secs(30);
/// Time for the operator to read before the machine powers off.
const READING: Duration = Duration::from_secs(300);
const MOMENT: Duration = Duration::from_millis(200);

/// The operator's wish about a tombstone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wish {
    /// No wish was given.
    Ask,
    /// The move is over.
    Clear,
    /// Start, and leave the tombstone.
    Ignore,
    /// Power off without waiting.
    PowerOff,
}

impl Wish {
    fn of(command_line: &str) -> Self {
        match command_line.split_whitespace().filter_map(|word| word.strip_prefix(WORD)).next_back() {
            Some("clear") => Self::Clear,
            Some("ignore") => Self::Ignore,
            Some("poweroff") => Self::PowerOff,
            _ => Self::Ask,
        }
    }
}

/// The name of a place and its contents.
type Found = (String, Result<Option<Record>, String>);

/// The decision if the system starts.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Verdict {
    Starts,
    /// The system starts: another system has moved from here.
    StartsBeside(String),
    /// The system does not start, for this reason.
    Stays(String),
}

/// Decides by the tombstones that were found; `system` is the system that would start.
fn decide(found: &[Found], system: Option<&str>) -> Verdict {
    let mut verdict = Verdict::Starts;
    for (place, tombstone) in found {
        let record = match tombstone {
            Ok(Some(record)) if record.forbids() => record,
            Ok(_) => continue,
            Err(why) => {
                return Verdict::Stays(format!(
                    "It is unknown if the system that starts here has moved to another machine: {place}: \
                     {why}."
                ));
            }
        };
        let is_anothers = matches!((&record.system, system), (Some(its), Some(ours)) if its != ours);
        if !is_anothers {
            return Verdict::Stays(text(record));
        }
        verdict = Verdict::StartsBeside(format!(
            "another system has moved from this hardware to {} ({}); this system starts",
            record.to,
            record.when()
        ));
    }
    verdict
}

/// Describes the fate of the system, and of its disks.
fn text(record: &Record) -> String {
    let fate = fate(record);
    if !record.disks_went {
        return fate;
    }
    format!(
        "{fate} Its disks went along. The disks here are older than the system, from the time at which it \
         has run on {}: its newer content is there. If that machine is lost, copy the content here from \
         what is left of it before you type `clear` (docs/guest.md, \"If the host is lost\").",
        record.to
    )
}

fn fate(record: &Record) -> String {
    let (to, when, attempt) = (&record.to, record.when(), &record.attempt);
    if record.state == State::Moved {
        return format!(
            "The system that starts here has moved to {to}, on {when} (attempt {attempt}), and runs there."
        );
    }
    format!(
        "The system that starts here was moved to {to}, on {when} (attempt {attempt}), and then this \
         machine lost its power: {to} had been told to go on with the system, or was about to be. Look at \
         the console of {to}. If the system runs there, leave this machine off. If a machine that has \
         arrived waits there, `adopt` starts it there, and `discard` throws it away."
    )
}

const WHAT_TO_DO: &str = "Two machines with the same disks destroy them, so nothing is started here. Only if \
    the system does not run elsewhere, and never will: type `clear` here, or start with \
    mercury.tombstone=clear on the kernel's command line. mercury.tombstone=ignore starts this system once \
    and leaves the tombstone; mercury.tombstone=poweroff does not wait. `off` powers off, \
    and so does this machine by itself in five minutes.";

/// Checks for tombstones, and returns only if the system may start.
#[must_use]
pub fn check(sysroot: &Sysroot) -> Exit {
    let wish = Wish::of(&sysroot.text("proc/cmdline").unwrap_or_default());
    let spots = spots(sysroot).unwrap_or_default();
    let places = wait_for_places(&spots, sysroot);
    let mut found: Vec<Found> = Vec::new();
    for (named, place) in &places {
        let read = place.as_ref().map_err(Clone::clone).and_then(Place::read);
        found.push((named.to_string(), read));
    }
    if places.is_empty() && !spots.is_empty() {
        let files: Vec<_> = spots.iter().map(|spot| &*spot.file).collect();
        found.push((files.join(", "), Err("the disk is not there".into())));
    }
    let places: Vec<Place> = places.into_iter().filter_map(|(_, place)| place.ok()).collect();
    match (decide(&found, initramfs::whose(sysroot).as_deref()), wish) {
        (Verdict::Starts, _) => {}
        (Verdict::StartsBeside(text), _) => say(&text),
        (Verdict::Stays(text), Wish::Ignore) => {
            say(&format!("{text} The system starts anyway: mercury.tombstone=ignore"))
        }
        (Verdict::Stays(text), Wish::Clear) => {
            say(&text);
            clear_all(&places);
        }
        (Verdict::Stays(text), Wish::PowerOff) => {
            say(&text);
            power_off();
        }
        (Verdict::Stays(text), Wish::Ask) => {
            say(&text);
            say(WHAT_TO_DO);
            ask();
            clear_all(&places);
        }
    }
    if let Err(error) = initramfs::say_checked(&spots, sysroot) {
        say(&format!("the check for a tombstone cannot be noted: {error}"));
    }
    Exit::Done
}

type Places = Vec<(super::Named, Result<Place, String>)>;

/// Waits until one of the prepared places on disks is there, if any are prepared.
fn wait_for_places(spots: &[super::Spot], sysroot: &Sysroot) -> Places {
    let end = Instant::now() + DISK_PATIENCE;
    loop {
        let places = all(spots, sysroot);
        if !places.is_empty() || spots.is_empty() || Instant::now() > end {
            return places;
        }
        thread::sleep(MOMENT);
    }
}

/// Asks the operator, and returns if the system is to start.
fn ask() {
    let mut operator = Operator::at_console();
    let end = Instant::now() + READING;
    while Instant::now() < end {
        match operator.word(&["clear", "off"]) {
            Some("clear") => return,
            Some(_) => break,
            None => thread::sleep(MOMENT),
        }
    }
    power_off()
}

fn clear_all(places: &[Place]) {
    for place in places {
        match clear(place) {
            Ok(true) => say("the tombstone is cleared; the system starts"),
            Ok(false) => {}
            Err(why) => say(&format!("the tombstone cannot be cleared: {why}; the system starts anyway")),
        }
    }
}

fn power_off() -> ! {
    say("this machine is powered off");
    rustix::fs::sync();
    // SAFETY: touches no memory of this process.
    unsafe { libc::reboot(libc::RB_POWER_OFF) };
    say("this machine could not be powered off: switch it off");
    loop {
        thread::sleep(Duration::from_secs(3600));
    }
}

fn say(text: &str) {
    eprintln!("\nmercury: {text}");
}

#[cfg(test)]
mod tests {
    use super::{super::record::tests::record, *};

    fn found(tombstone: Result<Option<Record>, String>) -> Vec<Found> {
        vec![("a variable".into(), tombstone)]
    }

    #[test]
    fn a_system_that_has_moved_stays() {
        let ours = "ab".repeat(16);
        for (state, words) in [
            (
                State::Committed,
                ["was moved to 10.9.0.3:4747, on 2026-11-25 01:00:00 UTC", "Look at the console"],
            ),
            (State::Moved, ["has moved to 10.9.0.3:4747", "runs there"]),
        ] {
            for system in [None, Some(&*ours)] {
                let Verdict::Stays(text) = decide(&found(Ok(Some(record(state, 1)))), system) else {
                    panic!("{state:?} starts")
                };
                assert!(words.iter().all(|word| text.contains(word)), "{text}");
                assert!(!text.contains("disks"), "{text}");
                let with_disks = Record { disks_went: true, ..record(state, 1) };
                let Verdict::Stays(text) = decide(&found(Ok(Some(with_disks))), system) else {
                    panic!("{state:?} starts")
                };
                assert!(text.contains("disks here are older") && text.contains("before you type `clear`"));
            }
            let other = "cd".repeat(16);
            let verdict = decide(&found(Ok(Some(record(state, 1)))), Some(&other));
            assert!(matches!(verdict, Verdict::StartsBeside(_)), "{verdict:?}");
            let nameless = Record { system: None, ..record(state, 1) };
            assert!(matches!(decide(&found(Ok(Some(nameless))), Some(&other)), Verdict::Stays(_)));
        }
    }

    #[test]
    fn a_system_without_a_tombstone_starts() {
        assert_eq!(decide(&[], None), Verdict::Starts);
        assert_eq!(decide(&found(Ok(None)), None), Verdict::Starts);
        assert_eq!(decide(&found(Ok(Some(record(State::Cleared, 9)))), None), Verdict::Starts);
    }

    #[test]
    fn an_unreadable_tombstone_keeps_the_system_off() {
        let mut all = found(Err("the tombstone is damaged".into()));
        all.push(("two blocks".into(), Ok(None)));
        assert!(matches!(decide(&all, None), Verdict::Stays(text) if text.contains("It is unknown")));
        all.reverse();
        assert!(matches!(decide(&all, None), Verdict::Stays(_)));
    }

    #[test]
    fn the_command_line_decides() {
        for (line, wish) in [
            ("quiet", Wish::Ask),
            ("quiet mercury.tombstone=clear ro", Wish::Clear),
            ("mercury.tombstone=clear mercury.tombstone=ignore", Wish::Ignore),
            ("mercury.tombstone=poweroff", Wish::PowerOff),
            ("mercury.tombstone=yes xmercury.tombstone=clear", Wish::Ask),
        ] {
            assert_eq!(Wish::of(line), wish, "{line}");
        }
    }
}
