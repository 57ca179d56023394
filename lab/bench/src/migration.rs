//! `lab bench migration`: the figures of moves, compared with QEMU's own migration of the same
//! machine.

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

/// The heading of this part of the page.
pub const HEADING: &str = "## Live migration";
/// The upper bound of pages read after the instant, divided by those that hashes of all memory
/// read.
pub const READ_AT_MOST: f64 = 0.25;
const BANK: &str = include_str!("../../guest/migration/bank");
const CUSTOMER: &str = include_str!("../../guest/migration/customer");
const WRITER: &str = include_str!("../../guest/migration/writer");
const SIZES_MIB: [u32; 3] = [512, 2048, 4096];
const CPUS: u32 = 2;
/// The downtime that QEMU may have, as Mercury may by default, at a gigabit a second.
const DOWNTIME_MS: u64 = 1000;
const WIRE: u64 = 125_000_000;
/// The number of transactions to wait for after a move.
const SETTLED: u64 = 50;
/// The number of transactions before a move from which their rate is measured.
const BEFORE: u64 = 300;
/// Memory of the machine on which the cost of a fault is counted.
const COUNTED_MIB: u32 = 512;
/// The number of times that a program's speed is measured.
const SPEEDS: u32 = 3;
/// Time limit for one reading of all memory.
const LOG_LIMIT: Duration = Duration::from_secs(300);

const LOG: &str = "Mercury, by the dirty log";
const HASHES: &str = "Mercury, by hashes of all memory";
const QEMU: &str = "QEMU's own";

/// A means to move the machine.
#[derive(Clone, Copy, Debug)]
enum Means {
    /// `mercury migrate` with these options.
    Mercury(&'static str),
    /// The migration of the machine's emulator.
    Qemu,
}

/// The ways, in turn, from one place to the other and back. The number of rounds is limited to
/// three, to limit the run's length.
///
/// QEMU's way is the last one. The machine takes its card's address along, which is then the
/// address of the next destination in the place that the machine has left.
const WAYS: [(&str, Means); 4] = [
    (LOG, Means::Mercury("--rounds 3")),
    (HASHES, Means::Mercury("--hash --rounds 3")),
    ("Mercury, no rounds", Means::Mercury("--rounds 0")),
    (QEMU, Means::Qemu),
];

/// One move.
#[derive(Clone, Debug, Serialize)]
pub struct Move {
    /// The way of the move.
    pub way: &'static str,
    /// The longest time without an answer, seen by a client on another machine.
    #[serde(serialize_with = "rounded")]
    pub client_seconds: f64,
    /// The time for which the machine stood still, as the mover reports it.
    #[serde(serialize_with = "rounded")]
    pub downtime_seconds: f64,
    /// Parts of that time, in milliseconds: until the instant, for the last pages, for their
    /// verification, for the start. QEMU does not report them.
    pub parts_ms: Option<[u64; 4]>,
    /// The time of the whole move.
    #[serde(serialize_with = "rounded")]
    pub total_seconds: f64,
    pub sent_bytes: u64,
    /// Rounds while the machine ran.
    pub rounds: u64,
    /// Pages that were read while the machine stood still. QEMU does not report them.
    pub read_pages: Option<u64>,
    /// A client's transactions per second until the machine stood still, divided by those before
    /// the move.
    #[serde(serialize_with = "rounded")]
    pub load_during_over_before: f64,
}

/// The cost of the dirty log for a writer, in instructions a page.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct DirtyFault {
    /// The cost of a native write.
    #[serde(serialize_with = "rounded")]
    pub native: f64,
    /// The cost of the first write in a round.
    #[serde(serialize_with = "rounded")]
    pub first: f64,
    /// The cost of another write in the same round.
    #[serde(serialize_with = "rounded")]
    pub again: f64,
}

/// All moves of a machine with one size of memory.
#[derive(Clone, Debug, Serialize)]
pub struct Size {
    pub memory_mib: u32,
    /// The moves, in the order in which they were made.
    pub moves: Vec<Move>,
    /// The client's longest wait with a dirty log, divided by the wait without one.
    #[serde(serialize_with = "rounded")]
    pub log_over_hashes: f64,
    /// The client's longest wait with a dirty log, divided by the wait with QEMU.
    #[serde(serialize_with = "rounded")]
    pub log_over_qemu: f64,
    /// Pages read while the machine stood still, with a dirty log, divided by those with hashes.
    #[serde(serialize_with = "rounded")]
    pub read_over_hashes: f64,
}

#[derive(Clone, Debug, Serialize)]
pub struct Migration {
    /// The client's longest wait of the largest machine with a dirty log, divided by the wait with
    /// QEMU.
    #[serde(serialize_with = "rounded")]
    pub downtime_over_qemu: f64,
    /// The client's longest wait with a dirty log: the largest machine's, divided by the smallest
    /// machine's.
    #[serde(serialize_with = "rounded")]
    pub downtime_largest_over_smallest: f64,
    /// The time of a program inside the machine's emulator, where Mercury runs, divided by its time
    /// beside the emulator, where QEMU's migration runs.
    #[serde(serialize_with = "rounded")]
    pub emulator_slowdown: f64,
    /// The cost of the dirty log.
    pub dirty_fault: DirtyFault,
    /// The number of moves with all sizes.
    pub moves: u64,
    /// Transactions that clients on another machine made meanwhile.
    pub transactions: u64,
    /// Transactions that were answered and not made.
    pub lost_transactions: u64,
    /// Transactions that were made twice.
    pub doubled_transactions: u64,
    pub emulator: String,
    /// The machine that moved.
    pub machine: String,
    /// The moves by size of memory.
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

    /// Returns the longest time without an answer, in seconds.
    fn client(&self, way: &str) -> f64 {
        self.of(way, |one| Some(one.client_seconds))
    }
}

/// A client's observations.
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
        let unexpected = || Error::Host(format!("the client printed `{text}` instead of its counts"));
        let numbers: Vec<u64> = text.split_whitespace().filter_map(|word| word.parse().ok()).collect();
        let [done, lost, doubled, longest_ms] = numbers[..] else { return Err(unexpected()) };
        Ok(Self { done, lost, doubled, longest_ms })
    }

    /// Waits until so many more transactions were made.
    fn after(peer: &Machine, more: u64) -> Result<Self> {
        let end = Self::by(peer)?.done + more;
        let seen = wait_for("a client's transactions", patient(LIMIT), || {
            Ok(Some(Self::by(peer)?).filter(|seen| seen.done >= end))
        });
        nothing_wrong(peer)?;
        seen
    }
}

/// The rate of a client's transactions from now on.
struct Rate {
    begun: Instant,
    done: u64,
}

impl Rate {
    fn begin(peer: &Machine) -> Result<Self> {
        peer.sh("touch /run/customer.reset; while test -e /run/customer.reset; do sleep 0.1; done")?;
        Ok(Self { done: Seen::by(peer)?.done, begun: Instant::now() })
    }

    /// Returns the transactions per second, without the longest time in which no answer came.
    fn end(&self, peer: &Machine) -> Result<f64> {
        let (seen, seconds) = (Seen::by(peer)?, self.begun.elapsed().as_secs_f64());
        Ok((seen.done - self.done) as f64 / (seconds - seen.longest_ms as f64 / 1e3))
    }
}

/// Measures all sizes.
///
/// # Errors
/// If a machine does not move, or not as it should.
pub fn measure(depth: Depth) -> Result<Migration> {
    let sizes = if depth == Depth::Full { &SIZES_MIB[..] } else { &SIZES_MIB[..1] };
    live::say("What a dirty log costs, on one CPU");
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

/// Counts a process's writes to its pages: natively, in a round of the dirty log, and again in it.
fn dirty_fault() -> Result<DirtyFault> {
    let machine = Machine::boot(counting_machine(COUNTED_MIB).qemu_version(Qemu::Newer))?;
    machine.put("/root/dirty", DIRTY, 0o755)?;
    machine.mercury("attach")?;
    let mut writer = machine.spawn("/root/dirty")?;
    writer.wait_output("ready", LIMIT)?;
    let mut write = || touched(&mut writer, "write");
    // The first write makes the pages exist.
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

/// Returns how much slower the machine's emulator is than this host: one program on one file in
/// both, each at its best.
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
                let destination = match vacant.take() {
                    Some(off) => off.start_as(at(place))?,
                    None => switch.boot_other(at(place))?,
                };
                let address = format!("10.9.0.1{place}");
                plug_in(&destination, &address)?;
                let (arrived, done, during) =
                    by_mercury(way, options, [&machine, peer], destination, &address)?;
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

/// Reads the answer of QEMU's `query-migrate`.
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
        // QEMU counts each scan for dirty pages, also the one at the end.
        rounds: done["ram"]["dirty-sync-count"].as_u64().unwrap_or(1) - 1,
        read_pages: None,
    }
}

fn by_mercury(
    way: &'static str,
    options: &str,
    [machine, peer]: [&Machine; 2],
    destination: Machine,
    address: &str,
) -> Result<(Machine, Move, f64)> {
    let key = receive(&destination, address)?;
    let boots = destination.boots();
    let during = Rate::begin(peer)?;
    let mut moving = machine.spawn(&migrate(&key, options))?;
    let goes_on = times(&destination, GOES_ON);
    let begins = arrives(machine, &destination, goes_on, &mut moving)?;
    if !begins {
        let why = format!("{:?} {:?} {}", moving.output_so_far(), moving.errors_so_far(), said(machine));
        return Err(Error::Host(format!("the machine has not moved: {why}")));
    }
    machine.wait_shutdown(LIMIT)?;
    println!("    {way}: off after {:.1} s; {}", during.begun.elapsed().as_secs_f64(), said(machine));
    destination.wait_other(boots)?;
    let during = during.end(peer)?;
    let said = said(machine);
    let done = report(way, &said).ok_or_else(|| {
        Error::Host(format!("the machine's last words have no figures of the move: {said}"))
    })?;
    Ok((destination, done, during))
}

/// Reads a move's figures from the last words of a machine that has moved, on its console.
pub(crate) fn last_words(said: &str) -> Option<Move> {
    report("", said)
}

fn report(way: &'static str, said: &str) -> Option<Move> {
    let pattern = concat!(
        r"(\d+) rounds; .* which read (\d+) pages at the end; .* stood still for (\d+) ms ",
        r"\((\d+) until the instant, (\d+) for the last pages, (\d+) until they were verified, ",
        r"(\d+) for the start\); (\d+) bytes were sent, in ([0-9.]+) s"
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

/// Returns this part of the page.
#[must_use]
pub fn section(figures: &Migration) -> String {
    let tables: Vec<String> = figures.sizes.iter().map(by_size).collect();
    format!(
        "{HEADING}\n\n\
        `cargo run -p mercury-lab-bench -- bench migration` writes this section alone. \
        It was measured on {}: {} and\n\
        more.\n\n\
        There were {} moves of one running machine in one run, from one emulator to another and on. \
        The machine talks\n\
        over TCP in both directions, its root is on NFS, and a process writes to up to a thousand pages a \
        second. A\n\
        client on a third machine made {} transactions meanwhile over one connection. \
        The moving machine counts each\n\
        of them: **{} lost, {} done twice**. \"Seen by a client\" is the longest time without an answer over \
        UDP. \"load\"\n\
        is the rate of the client's transactions until the machine stands still, \
        divided by the rate before the move.\n\n\
        On the largest machine a client sees a pause with the dirty log that is {:.1} × as long as with \
        QEMU's own\n\
        migration, and {:.2} × as long as on the smallest machine. The first write to a page in a round \
        costs {:.0}\n\
        instructions more than a native one ({:.0}). Another write to the page costs {:.0} more.\n\n\
        Each figure is one move, and times are those of an emulator whose host has two processors for three \
        machines.\n\
        So look at the ratios. QEMU's own migration is no equal comparison. It needs a virtual machine, \
        and QEMU runs\n\
        at the host's speed. For Mercury, reading, hashing, compressing, \
        TLS and both machines' network stacks are\n\
        emulated. A program that compresses (zstd) takes {:.1} times as long in the emulator as beside it. \
        If this\n\
        held for all of Mercury's time, its {:.1} × would be {:.2} ×. QEMU's migration may stand still for\n\
        {DOWNTIME_MS} ms, as Mercury's may, on a link of a gigabit a second. \
        Mercury's link is the emulated network\n\
        card, and Mercury has three rounds at most here.\n\n{}",
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
        A client sees a pause with the dirty log that is {:.2} × that with hashes and {:.1} × QEMU's. \
        While the\n\
        machine stands still, the dirty log has {:.3} × as many pages read as the hashes (at most \
        {READ_AT_MOST}).\n",
        thousands(size.memory_mib.into()),
        table(&header, &size.moves.iter().map(row).collect::<Vec<_>>()),
        size.log_over_hashes,
        size.log_over_qemu,
        size.read_over_hashes
    )
}

/// Returns the promises, and for each true if it is kept.
#[must_use]
pub fn promises(figures: &Migration) -> [(bool, &'static str); 3] {
    let all = |kept: fn(&Size) -> bool| figures.sizes.iter().all(kept);
    [
        (
            figures.lost_transactions == 0 && figures.doubled_transactions == 0,
            "transactions were lost in a move, or done twice",
        ),
        (all(|size| size.read_over_hashes <= READ_AT_MOST), "a move with the dirty log reads too many pages"),
        (all(|size| size.log_over_hashes < 1.0), "the dirty log does not shorten the downtime"),
    ]
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
pub(super) mod tests {
    use super::*;

    /// Returns figures that keep all promises.
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
