//! Moves in figures, beside QEMU's own of the same machine: `lab bench migration`.

use std::{mem, time::Instant};

use regex::Regex;
use serde::Serialize;
use serde_json::json;

use super::{Depth, checkpoint, stats::rounded};
use crate::{
    command::patient,
    error::{Error, Result, wait_for},
    kernel::Kernel,
    live,
    machine::Machine,
    markdown::{table, thousands},
    moving::{LIMIT, MOVING, PEER, Switch, plug_in, receive, said, times},
    restart::{
        boot_id, is_well, nothing_wrong,
        script::{CLOCK, HEAR, TALK},
        start,
    },
};

/// The heading of its part of the page.
pub const HEADING: &str = "## Live migration";
/// Pages that are read after the instant, by those that hashes of all memory read.
pub const READ_AT_MOST: f64 = 0.25;
/// What a spare says on its console in the end.
const GOES_ON: &str = "going on in the machine";
const BANK: &str = include_str!("../../guest/migration/bank");
const CUSTOMER: &str = include_str!("../../guest/migration/customer");
const WRITER: &str = include_str!("../../guest/migration/writer");
const SIZES_MIB: [u32; 2] = [512, 2048];
const CPUS: u32 = 2;
/// What QEMU is allowed, as Mercury is by default; and a gigabit a second.
const DOWNTIME_MS: u64 = 500;
const WIRE: u64 = 125_000_000;
/// Transactions before a move, and after it.
const SETTLED: u64 = 50;

const LOG: &str = "Mercury, by a log of writes";
const HASHES: &str = "Mercury, by hashes of all memory";
const QEMU: &str = "QEMU's own";

/// How the machine moves.
#[derive(Clone, Copy, Debug)]
enum Means {
    /// By `mercury migrate` with these options.
    Mercury(&'static str),
    /// By its emulator's command.
    Qemu,
}

/// In turn, from one place to the other and back. Of rounds there are three at most, for the run's length. QEMU's last: the
/// machine takes its card's address along, which is that of a spare's in the place that it has left.
const WAYS: [(&str, Means); 4] = [
    (LOG, Means::Mercury("--rounds 3")),
    (HASHES, Means::Mercury("--hash --rounds 3")),
    ("Mercury, no rounds", Means::Mercury("--rounds 0")),
    (QEMU, Means::Qemu),
];

/// One move.
#[derive(Clone, Debug, Serialize)]
pub struct Move {
    /// How.
    pub way: &'static str,
    /// The longest time without an answer, as a client on another machine saw it.
    #[serde(serialize_with = "rounded")]
    pub client_seconds: f64,
    /// How long the machine stood still, by whoever moved it.
    #[serde(serialize_with = "rounded")]
    pub downtime_seconds: f64,
    /// All of it.
    #[serde(serialize_with = "rounded")]
    pub total_seconds: f64,
    /// Bytes on the wire.
    pub sent_bytes: u64,
    /// Rounds while everything ran.
    pub rounds: u64,
    /// Pages that were read when the machine stood still; of QEMU's that is not known.
    pub read_pages: Option<u64>,
}

/// All moves of a machine of one size.
#[derive(Clone, Debug, Serialize)]
pub struct Size {
    /// MiB of memory.
    pub memory_mib: u32,
    /// In the order in which they were made.
    pub moves: Vec<Move>,
    /// Of what a client saw, with a log by without one.
    #[serde(serialize_with = "rounded")]
    pub log_over_hashes: f64,
    /// Of what a client saw, with a log by QEMU's.
    #[serde(serialize_with = "rounded")]
    pub log_over_qemu: f64,
    /// Of pages that were read when the machine stood still.
    #[serde(serialize_with = "rounded")]
    pub read_over_hashes: f64,
}

/// All figures.
#[derive(Clone, Debug, Serialize)]
pub struct Migration {
    /// Of all sizes.
    pub moves: u64,
    /// What clients on another machine had done meanwhile.
    pub transactions: u64,
    /// Those that were answered and not done.
    pub lost_transactions: u64,
    /// Those that were done twice.
    pub doubled_transactions: u64,
    /// What ran it all.
    pub emulator: String,
    /// What moved.
    pub machine: String,
    /// By size of memory.
    pub sizes: Vec<Size>,
}

/// What a client has seen.
#[derive(Clone, Copy, Debug, Default)]
struct Seen {
    done: u64,
    lost: u64,
    doubled: u64,
    longest_ms: u64,
}

impl Seen {
    fn by(peer: &Machine) -> Result<Self> {
        let text = peer.sh("cat /run/customer")?;
        let strange = || Error::Host(format!("the client says `{text}`"));
        let numbers: Vec<u64> = text.split_whitespace().filter_map(|word| word.parse().ok()).collect();
        let [done, lost, doubled, longest_ms] = numbers[..] else { return Err(strange()) };
        Ok(Self { done, lost, doubled, longest_ms })
    }

    /// Waits until so many more were done.
    fn after(peer: &Machine, more: u64) -> Result<Self> {
        let end = Self::by(peer)?.done + more;
        let seen = wait_for("a client's transactions", patient(LIMIT), || {
            Ok(Some(Self::by(peer)?).filter(|seen| seen.done >= end))
        });
        nothing_wrong(peer)?;
        seen
    }
}

/// Measures all of it.
///
/// # Errors
/// If a machine does not move, or not as it should.
pub fn measure(depth: Depth) -> Result<Migration> {
    let sizes = if depth == Depth::Full { &SIZES_MIB[..] } else { &SIZES_MIB[..1] };
    let mut all = Migration {
        moves: 0,
        transactions: 0,
        lost_transactions: 0,
        doubled_transactions: 0,
        emulator: checkpoint::emulator()?,
        machine: String::new(),
        sizes: Vec::new(),
    };
    for &memory_mib in sizes {
        live::say(&format!("Moves of a machine with {memory_mib} MiB at work"));
        let (machine, size, seen) = with_memory(memory_mib)?;
        all.machine = machine;
        all.moves += size.moves.len() as u64;
        all.transactions += seen.done;
        all.lost_transactions += seen.lost;
        all.doubled_transactions += seen.doubled;
        all.sizes.push(size);
    }
    Ok(all)
}

fn with_memory(memory_mib: u32) -> Result<(String, Size, Seen)> {
    let switch = Switch::boot()?;
    let peer = &switch.peer;
    let at = |place| switch.movable_by_qemu(Kernel::BookwormCloud, CPUS, memory_mib, place);
    let mut machine = switch.boot_moving(at(2))?;
    for (name, script, arguments) in [
        ("clock", CLOCK, ""),
        ("talk", TALK, PEER),
        ("hear", HEAR, ""),
        ("writer", WRITER, ""),
        ("bank", BANK, ""),
    ] {
        start(&machine, name, script, arguments)?;
    }
    switch.tell()?;
    start(peer, "customer", CUSTOMER, MOVING)?;
    machine.sh("modprobe -r kvm_amd 2> /dev/null || true")?;
    let id = boot_id(&machine)?;
    let (mut vacant, mut moves) = (None::<Machine>, Vec::new());
    for (number, (way, means)) in WAYS.into_iter().enumerate() {
        let place = if number % 2 == 0 { 3 } else { 2 };
        Seen::after(peer, SETTLED)?;
        let (arrived, done) = match means {
            Means::Qemu => {
                peer.sh("touch /run/customer.reset")?;
                let limits = json!({"downtime-limit": DOWNTIME_MS, "max-bandwidth": WIRE});
                let (arrived, done) = machine.migrate_by_qemu(at(place), limits)?;
                machine.power_cut()?;
                (arrived, by_qemu(way, &done))
            }
            Means::Mercury(options) => {
                let spare = match vacant.take() {
                    Some(off) => off.start_as(at(place))?,
                    None => switch.boot_other(at(place))?,
                };
                let address = format!("10.9.0.1{place}");
                plug_in(&spare, &address)?;
                by_mercury(way, options, [&machine, peer], spare, &address)?
            }
        };
        is_well(&arrived, &id)?;
        let seen = Seen::after(peer, SETTLED)?;
        let client_seconds = seen.longest_ms as f64 / 1e3;
        let done = Move { client_seconds, ..done };
        println!("    {done:?}");
        moves.push(done);
        vacant = Some(mem::replace(&mut machine, arrived));
    }
    let of = |way: &str, what: fn(&Move) -> Option<f64>| {
        moves.iter().find(|one| one.way == way).and_then(what).unwrap_or(f64::NAN)
    };
    let client = |way| of(way, |one| Some(one.client_seconds));
    let read = |way| of(way, |one| Some(one.read_pages? as f64));
    let size = Size {
        memory_mib,
        log_over_hashes: client(LOG) / client(HASHES),
        log_over_qemu: client(LOG) / client(QEMU),
        read_over_hashes: read(LOG) / read(HASHES),
        moves,
    };
    nothing_wrong(&machine)?;
    Ok((at(2).summary(), size, Seen::by(peer)?))
}

/// What QEMU's `query-migrate` says.
fn by_qemu(way: &'static str, done: &serde_json::Value) -> Move {
    let seconds = |name: &str| done[name].as_f64().unwrap_or(f64::NAN) / 1e3;
    Move {
        way,
        client_seconds: 0.0,
        downtime_seconds: seconds("downtime"),
        total_seconds: seconds("total-time"),
        sent_bytes: done["ram"]["transferred"].as_u64().unwrap_or(0),
        // It calls a look at what is dirty so, also the one at the end.
        rounds: done["ram"]["dirty-sync-count"].as_u64().unwrap_or(1) - 1,
        read_pages: None,
    }
}

fn by_mercury(
    way: &'static str,
    options: &str,
    [machine, peer]: [&Machine; 2],
    spare: Machine,
    address: &str,
) -> Result<(Machine, Move)> {
    let key = receive(&spare, address)?;
    let boots = spare.boots();
    peer.sh("touch /run/customer.reset")?;
    let begun = Instant::now();
    let mut moving = machine.spawn(&format!("mercury migrate {key} {options}"))?;
    let goes_on = times(&spare, GOES_ON);
    let begins = wait_for("the machine to arrive", patient(LIMIT), || {
        let has_arrived = times(&spare, GOES_ON) > goes_on;
        Ok((has_arrived || moving.has_ended().unwrap_or(true)).then_some(has_arrived))
    })?;
    if !begins {
        let why = format!("{:?} {:?} {}", moving.output_so_far(), moving.errors_so_far(), said(machine));
        return Err(Error::Host(format!("the machine has not moved: {why}")));
    }
    machine.wait_shutdown(LIMIT)?;
    println!("    {way}: off after {:.1} s; {}", begun.elapsed().as_secs_f64(), said(machine));
    spare.wait_other(boots)?;
    let said = said(machine);
    let done = report(way, &said).ok_or_else(|| Error::Host(format!("the machine's last words: {said}")))?;
    Ok((spare, done))
}

/// The last words of a machine that has moved, on its console.
fn report(way: &'static str, said: &str) -> Option<Move> {
    let pattern = r"(\d+) rounds; .* which read (\d+) pages at the end; .* stood still for (\d+) ms .*; (\d+) bytes were sent, in ([0-9.]+) s";
    let found = Regex::new(pattern).ok()?.captures_iter(said).last()?;
    let number = |group: usize| found[group].parse::<u64>().ok();
    Some(Move {
        way,
        client_seconds: 0.0,
        downtime_seconds: number(3)? as f64 / 1e3,
        total_seconds: found[5].parse().ok()?,
        sent_bytes: number(4)?,
        rounds: number(1)?,
        read_pages: number(2),
    })
}

/// This part of the page.
#[must_use]
pub fn section(figures: &Migration) -> String {
    let tables: Vec<String> = figures.sizes.iter().map(by_size).collect();
    format!(
        "{HEADING}\n\n\
        Written by `make bench`, or alone by `cargo run -p mercury-lab -- bench migration`, on {}: {} and more.\n\
        {} moves in one run, from one emulator to another and on, of the same running machine: it talks over TCP in both\n\
        directions, its root is on NFS, and a process writes to up to a thousand pages a second. A client on a third machine has made {} transactions meanwhile\n\
        over one connection, each of which is counted on the machine that moves: **{} lost, {} done twice**. \"Seen by a client\" is the longest time\n\
        without an answer over UDP.\n\n\
        Each figure is one move, and times are those of an emulator whose host has two processors for three machines: look at the ratios.\n\
        QEMU's own migration is no equal: it needs the machine to be a virtual one, and QEMU itself runs at the host's speed, while\n\
        reading, hashing, compressing, TLS and both machines' network stacks are emulated for Mercury. It may stand still for {DOWNTIME_MS} ms as\n\
        Mercury may, on a wire of a gigabit a second; Mercury's wire is the emulated network card. Mercury has three rounds at most here.\n\n{}",
        figures.emulator,
        figures.machine,
        figures.moves,
        thousands(figures.transactions),
        figures.lost_transactions,
        figures.doubled_transactions,
        tables.join("\n")
    )
}

fn by_size(size: &Size) -> String {
    let row = |one: &Move| {
        vec![
            one.way.to_owned(),
            format!("{:.2} s", one.client_seconds),
            format!("{:.2} s", one.downtime_seconds),
            format!("{:.1} s", one.total_seconds),
            one.rounds.to_string(),
            format!("{} MB", one.sent_bytes / 1_000_000),
            one.read_pages.map_or_else(|| "–".to_owned(), thousands),
        ]
    };
    let header = [
        "way",
        "seen by a client",
        "by its own report",
        "in all",
        "rounds",
        "sent",
        "pages read while still",
    ];
    format!(
        "### {} MiB\n\n{}\n\
        As a client sees it the log's is {:.2} × the hashes' and {:.1} × QEMU's. It reads {:.3} × as many pages while everything stands\n\
        still as the hashes do (at most {READ_AT_MOST}).\n",
        thousands(size.memory_mib.into()),
        table(&header, &size.moves.iter().map(row).collect::<Vec<_>>()),
        size.log_over_hashes,
        size.log_over_qemu,
        size.read_over_hashes
    )
}

/// What is promised, and whether it is kept.
#[must_use]
pub fn promises(figures: &Migration) -> [(bool, &'static str); 3] {
    let all = |kept: fn(&Size) -> bool| figures.sizes.iter().all(kept);
    [
        (
            figures.lost_transactions == 0 && figures.doubled_transactions == 0,
            "transactions were lost in a move, or done twice",
        ),
        (all(|size| size.read_over_hashes <= READ_AT_MOST), "the log of writes has too many pages read"),
        (all(|size| size.log_over_hashes < 1.0), "the log of writes makes the downtime no shorter"),
    ]
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
pub(super) mod tests {
    use super::*;

    /// With all promises kept.
    pub fn figures() -> Migration {
        let one = |way, read_pages| Move {
            way,
            client_seconds: 1.5,
            downtime_seconds: 1.25,
            total_seconds: 30.0,
            sent_bytes: 50_000_000,
            rounds: 4,
            read_pages,
        };
        Migration {
            moves: 2,
            transactions: 1234,
            lost_transactions: 0,
            doubled_transactions: 0,
            emulator: "QEMU".into(),
            machine: "one".into(),
            sizes: vec![Size {
                memory_mib: 2048,
                moves: vec![one(QEMU, None), one(LOG, Some(7000))],
                log_over_hashes: 0.2,
                log_over_qemu: 3.0,
                read_over_hashes: 0.02,
            }],
        }
    }

    #[test]
    fn last_words_are_understood() {
        let said = "mercury migrate: this machine has moved: 5 rounds; what had changed was found by a log of writes, which \
            read 8123 pages at the end; applications stood still for 4321 ms (640 until the instant, 3000 for the last \
            pages); 56789 bytes were sent, in 61.5 s. It is powered off";
        let found = report(LOG, said).unwrap();
        assert_eq!((found.rounds, found.read_pages, found.sent_bytes), (5, Some(8123), 56_789));
        assert_eq!((found.downtime_seconds, found.total_seconds), (4.321, 61.5));
        assert!(report(LOG, "mercury migrate: it did not").is_none());
    }

    #[test]
    fn a_lost_transaction_breaks_a_promise() {
        assert!(promises(&figures()).iter().all(|(kept, _)| *kept));
        let lost = Migration { lost_transactions: 1, ..figures() };
        assert!(!promises(&lost)[0].0);
        let section = section(&figures());
        assert!(section.contains("**0 lost, 0 done twice**"), "{section}");
        assert!(section.contains("| 7,000 |") || section.contains(" 7,000 |"), "{section}");
    }
}
