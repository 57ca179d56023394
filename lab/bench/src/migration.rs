//! Moves in figures, beside QEMU's own of the same machine: `lab bench migration`.

use std::{
    mem,
    process::Command,
    time::{Duration, Instant},
};

use regex::Regex;
use serde::Serialize;
use serde_json::json;

use super::{Depth, checkpoint, counts::counting_machine, exits::DIRTY, kvm::touched, stats::rounded};
use mercury_lab::{
    artefacts,
    command::patient,
    error::{Error, Result, wait_for},
    kernel::Kernel,
    live,
    machine::Machine,
    markdown::{table, thousands},
    moving::{GOES_ON, LIMIT, MOVING, PEER, Switch, arrives, migrate, plug_in, receive, said, times},
    restart::{
        boot_id, is_well, nothing_wrong,
        script::{CLOCK, HEAR, TALK},
        start,
    },
    spec::Qemu,
};

/// The heading of its part of the page.
pub const HEADING: &str = "## Live migration";
/// Pages that are read after the instant, by those that hashes of all memory read.
pub const READ_AT_MOST: f64 = 0.25;
const BANK: &str = include_str!("../../guest/migration/bank");
const CUSTOMER: &str = include_str!("../../guest/migration/customer");
const WRITER: &str = include_str!("../../guest/migration/writer");
const SIZES_MIB: [u32; 3] = [512, 2048, 4096];
const CPUS: u32 = 2;
/// What QEMU is allowed, as Mercury is by default; and a gigabit a second.
const DOWNTIME_MS: u64 = 1000;
const WIRE: u64 = 125_000_000;
/// Transactions after a move.
const SETTLED: u64 = 50;
/// And before it, in so many of which their rate is known.
const BEFORE: u64 = 300;
/// Of the machine on which the cost of a fault is counted.
const COUNTED_MIB: u32 = 512;
/// How often a program's time is taken.
const SPEEDS: u32 = 3;
/// Until all of memory was read once.
const LOG_LIMIT: Duration = Duration::from_secs(300);

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
    /// What that was made of, in milliseconds: until the instant, for the last pages, until they were verified, for the start; of
    /// QEMU's that is not known.
    pub parts_ms: Option<[u64; 4]>,
    /// All of it.
    #[serde(serialize_with = "rounded")]
    pub total_seconds: f64,
    /// Bytes on the wire.
    pub sent_bytes: u64,
    /// Rounds while everything ran.
    pub rounds: u64,
    /// Pages that were read when the machine stood still; of QEMU's that is not known.
    pub read_pages: Option<u64>,
    /// A client's transactions a second until the machine stands still, by those before.
    #[serde(serialize_with = "rounded")]
    pub load_during_over_before: f64,
}

/// What the log costs who writes, in instructions a page.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct DirtyFault {
    /// Written natively.
    #[serde(serialize_with = "rounded")]
    pub native: f64,
    /// Written for the first time in a round.
    #[serde(serialize_with = "rounded")]
    pub first: f64,
    /// Written again.
    #[serde(serialize_with = "rounded")]
    pub again: f64,
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
    /// Of what a client saw of the largest machine's, with a log by QEMU's.
    #[serde(serialize_with = "rounded")]
    pub downtime_over_qemu: f64,
    /// Of what a client saw with a log, of the largest machine's by the smallest one's.
    #[serde(serialize_with = "rounded")]
    pub downtime_largest_over_smallest: f64,
    /// How much slower a program is in the machine's emulator, in which Mercury moves it, than beside it, where QEMU does.
    #[serde(serialize_with = "rounded")]
    pub emulator_slowdown: f64,
    /// Of the log.
    pub dirty_fault: DirtyFault,
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

impl Size {
    fn new(memory_mib: u32, moves: Vec<Move>) -> Self {
        let unknown = f64::NAN;
        let mut size = Self {
            memory_mib,
            moves,
            log_over_hashes: unknown,
            log_over_qemu: unknown,
            read_over_hashes: unknown,
        };
        let read = |way| size.of(way, |one| Some(one.read_pages? as f64));
        let read_over_hashes = read(LOG) / read(HASHES);
        let [log, hashes, qemu] = [LOG, HASHES, QEMU].map(|way| size.client(way));
        (size.log_over_hashes, size.log_over_qemu) = (log / hashes, log / qemu);
        size.read_over_hashes = read_over_hashes;
        size
    }

    fn of(&self, way: &str, what: fn(&Move) -> Option<f64>) -> f64 {
        self.moves.iter().find(|one| one.way == way).and_then(what).unwrap_or(f64::NAN)
    }

    /// Seconds without an answer.
    fn client(&self, way: &str) -> f64 {
        self.of(way, |one| Some(one.client_seconds))
    }
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

/// How quickly a client's transactions are done from now on.
struct Rate {
    begun: Instant,
    done: u64,
}

impl Rate {
    fn begin(peer: &Machine) -> Result<Self> {
        peer.sh("touch /run/customer.reset; while test -e /run/customer.reset; do sleep 0.1; done")?;
        Ok(Self { done: Seen::by(peer)?.done, begun: Instant::now() })
    }

    /// Transactions a second, but for the time of the longest one without an answer.
    fn end(&self, peer: &Machine) -> Result<f64> {
        let (seen, seconds) = (Seen::by(peer)?, self.begun.elapsed().as_secs_f64());
        Ok((seen.done - self.done) as f64 / (seconds - seen.longest_ms as f64 / 1e3))
    }
}

/// Measures all of it.
///
/// # Errors
/// If a machine does not move, or not as it should.
pub fn measure(depth: Depth) -> Result<Migration> {
    let sizes = if depth == Depth::Full { &SIZES_MIB[..] } else { &SIZES_MIB[..1] };
    live::say("What a log of writes costs, on one CPU");
    let dirty_fault = dirty_fault()?;
    println!("    {dirty_fault:?}");
    let mut all = Migration {
        downtime_over_qemu: f64::NAN,
        downtime_largest_over_smallest: f64::NAN,
        emulator_slowdown: f64::NAN,
        dirty_fault,
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
        let (machine, size, seen) = with_memory(memory_mib, &mut all.emulator_slowdown)?;
        all.machine = machine;
        all.moves += size.moves.len() as u64;
        all.transactions += seen.done;
        all.lost_transactions += seen.lost;
        all.doubled_transactions += seen.doubled;
        all.sizes.push(size);
    }
    if let [first, .., last] | [first @ last] = &all.sizes[..] {
        all.downtime_over_qemu = last.log_over_qemu;
        all.downtime_largest_over_smallest = last.client(LOG) / first.client(LOG);
    }
    Ok(all)
}

/// A process writes to its pages natively, in a log's round, and again.
fn dirty_fault() -> Result<DirtyFault> {
    let machine = Machine::boot(counting_machine(COUNTED_MIB).qemu_version(Qemu::Newer))?;
    machine.put("/root/dirty", DIRTY, 0o755)?;
    machine.mercury("attach")?;
    let mut writer = machine.spawn("/root/dirty")?;
    writer.wait_output("ready", LIMIT)?;
    let mut write = || touched(&mut writer, "write");
    // The first time they come into being.
    write()?;
    let native = write()?;
    let mut log = machine.spawn("mercury-workload log --rounds 1 --wait-file /run/go")?;
    log.wait_output("all of memory has been read", LOG_LIMIT)?;
    let (first, again) = (write()?, write()?);
    machine.sh("touch /run/go")?;
    log.wait(LOG_LIMIT)?.check()?;
    writer.close_stdin()?;
    writer.wait(LIMIT)?.check()?;
    machine.check_health()?;
    machine.shut_down()?;
    Ok(DirtyFault { native, first, again })
}

/// How much slower the machine's emulator is than this host: one program on one file in both, each at its best.
fn slowdown(machine: &Machine) -> Result<f64> {
    let program = artefacts::build_program("mercury-lab-workload", "mercury-workload")?;
    let file = artefacts::build_program("mercury-cli", "mercury")?;
    let (mut here, mut there) = (f64::INFINITY, f64::INFINITY);
    for _ in 0..SPEEDS {
        let output = Command::new(&program).arg("compress").arg(&file).output();
        let output = output.map_err(|error| Error::Host(format!("{}: {error}", program.display())))?;
        let report = serde_json::from_slice(&output.stdout)
            .map_err(|error| Error::Host(format!("{} compress: {error}", program.display())))?;
        here = here.min(checkpoint::number(&report, "seconds")?);
        let report = checkpoint::ask(machine, "mercury-workload compress $(command -v mercury)", LIMIT)?;
        there = there.min(checkpoint::number(&report, "seconds")?);
    }
    Ok(there / here)
}

fn with_memory(memory_mib: u32, slower: &mut f64) -> Result<(String, Size, Seen)> {
    let switch = Switch::boot()?;
    let peer = &switch.peer;
    let at = |place| switch.movable_by_qemu(Kernel::BookwormCloud, CPUS, memory_mib, place);
    let mut machine = switch.boot_moving(at(2))?;
    if slower.is_nan() {
        *slower = slowdown(&machine)?;
        println!("    a program takes {slower:.1} times as long as beside the emulator");
    }
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
        let before = Rate::begin(peer)?;
        Seen::after(peer, BEFORE)?;
        let before = before.end(peer)?;
        let (arrived, done) = match means {
            Means::Qemu => {
                let limits = json!({"downtime-limit": DOWNTIME_MS, "max-bandwidth": WIRE});
                let during = Rate::begin(peer)?;
                let (arrived, done) = machine.migrate_by_qemu(at(place), limits)?;
                let during = during.end(peer)?;
                machine.power_cut()?;
                (arrived, Move { load_during_over_before: during / before, ..by_qemu(way, &done) })
            }
            Means::Mercury(options) => {
                let spare = match vacant.take() {
                    Some(off) => off.start_as(at(place))?,
                    None => switch.boot_other(at(place))?,
                };
                let address = format!("10.9.0.1{place}");
                plug_in(&spare, &address)?;
                let (arrived, done, during) = by_mercury(way, options, [&machine, peer], spare, &address)?;
                (arrived, Move { load_during_over_before: during / before, ..done })
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
    let size = Size::new(memory_mib, moves);
    nothing_wrong(&machine)?;
    Ok((at(2).summary(), size, Seen::by(peer)?))
}

/// What QEMU's `query-migrate` says.
fn by_qemu(way: &'static str, done: &serde_json::Value) -> Move {
    let seconds = |name: &str| done[name].as_f64().unwrap_or(f64::NAN) / 1e3;
    Move {
        way,
        client_seconds: 0.0,
        load_during_over_before: 0.0,
        downtime_seconds: seconds("downtime"),
        parts_ms: None,
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
) -> Result<(Machine, Move, f64)> {
    let key = receive(&spare, address)?;
    let boots = spare.boots();
    let during = Rate::begin(peer)?;
    let mut moving = machine.spawn(&migrate(&key, options))?;
    let goes_on = times(&spare, GOES_ON);
    let begins = arrives(machine, &spare, goes_on, &mut moving)?;
    if !begins {
        let why = format!("{:?} {:?} {}", moving.output_so_far(), moving.errors_so_far(), said(machine));
        return Err(Error::Host(format!("the machine has not moved: {why}")));
    }
    machine.wait_shutdown(LIMIT)?;
    println!("    {way}: off after {:.1} s; {}", during.begun.elapsed().as_secs_f64(), said(machine));
    spare.wait_other(boots)?;
    let during = during.end(peer)?;
    let said = said(machine);
    let done = report(way, &said).ok_or_else(|| Error::Host(format!("the machine's last words: {said}")))?;
    Ok((spare, done, during))
}

/// What the last words of a machine that has moved, on its console, say of the move.
pub(crate) fn last_words(said: &str) -> Option<Move> {
    report("", said)
}

fn report(way: &'static str, said: &str) -> Option<Move> {
    let pattern = concat!(
        r"(\d+) rounds; .* which read (\d+) pages at the end; .* stood still for (\d+) ms \((\d+) until the instant, ",
        r"(\d+) for the last pages, (\d+) until they were verified, (\d+) for the start\); (\d+) bytes were sent, in ([0-9.]+) s"
    );
    let found = Regex::new(pattern).ok()?.captures_iter(said).last()?;
    let number = |group: usize| found[group].parse::<u64>().ok();
    Some(Move {
        way,
        client_seconds: 0.0,
        load_during_over_before: 0.0,
        downtime_seconds: number(3)? as f64 / 1e3,
        parts_ms: Some([number(4)?, number(5)?, number(6)?, number(7)?]),
        total_seconds: found[9].parse().ok()?,
        sent_bytes: number(8)?,
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
        Written by `make bench`, or alone by `cargo run -p mercury-lab-bench -- bench migration`, on {}: {} and more.\n\
        {} moves in one run, from one emulator to another and on, of the same running machine: it talks over TCP in both\n\
        directions, its root is on NFS, and a process writes to up to a thousand pages a second. A client on a third machine has made {} transactions meanwhile\n\
        over one connection, each of which is counted on the machine that moves: **{} lost, {} done twice**. \"Seen by a client\" is the longest time\n\
        without an answer over UDP, \"load\" the rate of its transactions until the machine stands still, by that before the move.\n\
        On the largest machine the move by the log takes {:.1} × as long from a client's view as QEMU's own, and {:.2} × as long as on\n\
        the smallest one. A page that is written for the first time in a round costs {:.0} instructions more than natively ({:.0}),\n\
        one that is written again {:.0}.\n\n\
        Each figure is one move, and times are those of an emulator whose host has two processors for three machines: look at the ratios.\n\
        QEMU's own migration is no equal: it needs the machine to be a virtual one, and QEMU itself runs at the host's speed, while\n\
        reading, hashing, compressing, TLS and both machines' network stacks are emulated for Mercury. A program that compresses (zstd) takes {:.1} times\n\
        as long in the emulator as beside it; were all of Mercury's time of that kind, its {:.1} × would be {:.2} ×. QEMU's may stand still for {DOWNTIME_MS} ms as\n\
        Mercury may, on a wire of a gigabit a second; Mercury's wire is the emulated network card. Mercury has three rounds at most here.\n\n{}",
        figures.emulator,
        figures.machine,
        figures.moves,
        thousands(figures.transactions),
        figures.lost_transactions,
        figures.doubled_transactions,
        figures.downtime_over_qemu,
        figures.downtime_largest_over_smallest,
        figures.dirty_fault.first - figures.dirty_fault.native,
        figures.dirty_fault.native,
        figures.dirty_fault.again - figures.dirty_fault.native,
        figures.emulator_slowdown,
        figures.downtime_over_qemu,
        figures.downtime_over_qemu / figures.emulator_slowdown,
        tables.join("\n")
    )
}

fn by_size(size: &Size) -> String {
    let row = |one: &Move| {
        vec![
            one.way.to_owned(),
            format!("{:.2} s", one.client_seconds),
            format!("{:.2} s", one.downtime_seconds),
            one.parts_ms.map_or_else(
                || "–".to_owned(),
                |parts| parts.map(|ms| format!("{:.2}", ms as f64 / 1e3)).join(" + "),
            ),
            format!("{:.1} s", one.total_seconds),
            one.rounds.to_string(),
            format!("{:.2}", one.load_during_over_before),
            format!("{} MB", one.sent_bytes / 1_000_000),
            one.read_pages.map_or_else(|| "–".to_owned(), thousands),
        ]
    };
    let header = [
        "way",
        "seen by a client",
        "by its own report",
        "instant + last pages + verified + start",
        "in all",
        "rounds",
        "load",
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
            parts_ms: Some([400, 500, 200, 150]),
            total_seconds: 30.0,
            sent_bytes: 50_000_000,
            rounds: 4,
            read_pages,
            load_during_over_before: 0.75,
        };
        Migration {
            downtime_over_qemu: 3.0,
            downtime_largest_over_smallest: 1.0,
            emulator_slowdown: 12.0,
            dirty_fault: DirtyFault { native: 100.0, first: 1100.0, again: 101.0 },
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
        let said = "mercury migrate: this machine has moved: 5 rounds; changed pages were found by a \
            dirty log, which read 8123 pages at the end; applications stood still for 4321 ms (640 until \
            the instant, 3000 for the last pages, 400 until they were verified, 281 for the start); 56789 \
            bytes were sent, in 61.5 s. It is powered off";
        let found = report(LOG, said).unwrap();
        assert_eq!((found.rounds, found.read_pages, found.sent_bytes), (5, Some(8123), 56_789));
        assert_eq!((found.downtime_seconds, found.total_seconds), (4.321, 61.5));
        assert_eq!(found.parts_ms, Some([640, 3000, 400, 281]));
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
