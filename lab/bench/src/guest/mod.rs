//! `lab bench guest`: a machine like metal with PostgreSQL that becomes a guest of a host in use and comes
//! back, beside a move to an equal spare in the same run; and the cost of PostgreSQL in such a guest, beside
//! an ordinary guest.

pub mod database;

use super::{Depth, checkpoint};
use database::Database;
use mercury_lab::{
    error::{Error, Result},
    kernel::Kernel,
    live,
    markdown::{table, thousands},
    round_trip::{Leg, RoundTrips},
    spec::Nic,
};
use serde::Serialize;

/// The heading of this part of the page.
pub const HEADING: &str = "## A bare machine as a guest, and back";
/// The key of this section in docs/benchmarks.json.
pub const KEY: &str = "guest";

/// The largest monitor beside the guest's memory.
const MONITOR_MAX: u64 = 16 << 20;
/// The largest wait of a client at the way to a host in use, divided by that at the way to an equal spare.
const DOWNTIME_MAX: f64 = 1.2;
/// The smallest throughput of a database in a guest that has come, divided by that in an ordinary guest.
const DATABASE_MIN: f64 = 0.95;
const TRIPS: [u64; 2] = [3, 1];
/// Samples of the database's cost in each guest.
const SAMPLES: [usize; 2] = [5, 2];

/// One move.
#[derive(Clone, Debug, Serialize)]
struct Move {
    way: &'static str,
    /// The longest time in which a client of PostgreSQL had no answer.
    client_seconds: f64,
}

impl Move {
    fn of(way: &'static str, leg: &Leg) -> Self {
        Self { way, client_seconds: leg.silence.as_millis() as f64 / 1e3 }
    }
}

/// The figures of a run.
#[derive(Clone, Debug, Serialize)]
pub struct Figures {
    /// Ways to the host in use and back to the hardware.
    pub round_trips: u64,
    /// Transactions that clients of PostgreSQL were told are committed.
    pub transactions: u64,
    /// Those of them that the database does not have at the end.
    pub lost_transactions: u64,
    /// Transactions that it has more than once.
    pub doubled_transactions: u64,
    /// True if the database has nothing else, and its sums are right.
    pub ledger_is_right: bool,
    /// The largest monitor at its end, beside the guest's memory.
    pub monitor_bytes: u64,
    /// The median wait of a client at the way to the host, divided by the wait at the way to an equal spare.
    pub downtime_over_spare: f64,
    /// PostgreSQL in a machine of an image, beside an ordinary guest.
    pub database: Database,
    /// Processors of the machine.
    pub cpus: u32,
    emulator: String,
    moves: Vec<Move>,
}

const SPARE: &str = "to an equal spare";
const THERE: &str = "to the host in use";
const BACK: &str = "back to the hardware";

/// The figures of a run that has not ended. Losses are counted at its end alone.
#[derive(Clone, Debug, Serialize)]
pub struct SoFar {
    database: Database,
    round_trips: u64,
    monitor_bytes: u64,
    /// Missing until the machine has been at the host.
    downtime_over_spare: Option<f64>,
    moves: Vec<Move>,
}

impl SoFar {
    fn of(database: &Database, round_trips: u64, monitor_bytes: u64, moves: &[Move]) -> Self {
        let downtime_over_spare = Some(ratio(moves)).filter(|ratio| ratio.is_finite());
        let database = database.clone();
        Self { database, round_trips, monitor_bytes, downtime_over_spare, moves: moves.to_vec() }
    }
}

/// Measures the database, a move to an equal spare, and round trips. `keep` gets the figures after each of
/// them.
///
/// # Errors
/// If a machine does not move, or is not well.
pub fn measure(depth: Depth, keep: impl Fn(&SoFar) -> Result<()>) -> Result<Figures> {
    const CPUS: u32 = 1;
    let is_quick = usize::from(depth != Depth::Full);
    let (count, samples) = (TRIPS[is_quick], SAMPLES[is_quick]);
    live::say("PostgreSQL in a machine that becomes a guest, and in an ordinary guest");
    let database = database::measure(samples)?;
    keep(&SoFar::of(&database, 0, 0, &[]))?;
    live::say("A machine like metal with PostgreSQL moves to an equal spare");
    let mut trips = RoundTrips::begin(Kernel::BookwormGeneric, CPUS, Nic::Virtio)?;
    let mut moves = vec![Move::of(SPARE, &trips.to_spare()?)];
    println!("    {:?}", moves[0]);
    let mut monitor_bytes = 0;
    keep(&SoFar::of(&database, 0, monitor_bytes, &moves))?;
    for number in 1..=count {
        live::say(&format!("Round trip {number} of {count}, to a host in use and back"));
        let trip = trips.there_and_back()?;
        monitor_bytes = trip.monitor_bytes.max(monitor_bytes);
        let both = [Move::of(THERE, &trip.there), Move::of(BACK, &trip.back)];
        println!("    {both:?}");
        moves.extend(both);
        keep(&SoFar::of(&database, number, monitor_bytes, &moves))?;
    }
    live::say("The database is compared with what its clients were told");
    let ledger = trips.finish()?;
    if ledger.acknowledged == 0 {
        return Err(Error::Host("the clients of PostgreSQL have done nothing".into()));
    }
    Ok(Figures {
        round_trips: count,
        transactions: ledger.acknowledged,
        lost_transactions: ledger.lost,
        doubled_transactions: ledger.doubled,
        ledger_is_right: ledger.is_right(),
        monitor_bytes,
        downtime_over_spare: ratio(&moves),
        database,
        cpus: CPUS,
        emulator: checkpoint::emulator()?,
        moves,
    })
}

/// Returns the median wait at the way to the host, divided by the wait at the way to the spare.
fn ratio(moves: &[Move]) -> f64 {
    let waits = |way: &str| {
        let mut all: Vec<f64> =
            moves.iter().filter(|one| one.way == way).map(|one| one.client_seconds).collect();
        all.sort_by(f64::total_cmp);
        all.get(all.len() / 2).copied().unwrap_or(f64::NAN)
    };
    (waits(THERE) / waits(SPARE) * 1000.0).round() / 1000.0
}

/// Returns this part of the page.
#[must_use]
pub fn section(figures: &Figures) -> String {
    let rows: Vec<_> = figures
        .moves
        .iter()
        .map(|one| vec![one.way.to_owned(), format!("{:.2} s", one.client_seconds)])
        .collect();
    format!(
        "{HEADING}\n\n\
        `lab bench guest` writes this section alone. A machine like metal (Debian 12, 6.1, {} CPU, 1.5 GiB, \
        three NVMe\n\
        disks, a card of virtio's, its root in RAM) has PostgreSQL, and clients on a third machine. It moves \
        to an equal\n\
        spare first. Then it moves to a host in use, where it goes on as a guest, and back to its hardware, \
        {} times. It\n\
        was measured on {}.\n\n\
        Clients were told of {} transactions. **{} were lost, {} were done twice**; the sums of all accounts \
        are \
        {}. The\n\
        monitor took {:.1} MiB beside the guest's memory at most.\n\n{}\n\
        A client waits {:.2} × as long at the way to the host as at the way to the spare (median; at most \
        {DOWNTIME_MAX} is\n\
        wanted). Each figure is one move, between emulators that share two processors with others. The guest \
        runs in\n\
        nested paging that is emulated as well, so its way back is much slower than on hardware.\n\n{}",
        figures.cpus,
        figures.round_trips,
        figures.emulator,
        thousands(figures.transactions),
        figures.lost_transactions,
        figures.doubled_transactions,
        if figures.ledger_is_right { "right" } else { "wrong" },
        figures.monitor_bytes as f64 / f64::from(1 << 20),
        table(&["move", "longest wait of a client of PostgreSQL"], &rows),
        figures.downtime_over_spare,
        cost(&figures.database),
    )
}

/// Returns the part of the page about the database's cost.
fn cost(database: &Database) -> String {
    let row = |what: &str, instructions| vec![what.to_owned(), thousands(instructions)];
    let rows = [
        row("in a machine that has become a guest", database.arrived_instructions),
        row("in an ordinary guest of QEMU", database.ordinary_instructions),
    ];
    format!(
        "The same PostgreSQL, kernel (6.1), memory and disk on NVMe are in a guest that comes from an image, \
        and in an\n\
        ordinary guest of stock QEMU, one after the other on one host. A transaction of pgbench's TPC-B \
        takes so many\n\
        instructions of the monitor's process, with its guest and with KVM's work for it; waits do not \
        count.\n\n{}\n\
        By that a processor allows {:.2} × the throughput in the guest that has come (at least \
        {DATABASE_MIN} is wanted).\n\
        These are the medians of {} samples each, of which no two differ by more than {:.1} %.\n",
        table(&["pgbench", "instructions of a transaction"], &rows),
        database.arrived_over_ordinary,
        database.samples,
        database.noise * 100.0,
    )
}

/// Returns the promises, and for each true if it is kept.
#[must_use]
pub fn promises(figures: &Figures) -> [(bool, &'static str); 4] {
    let lost = figures.lost_transactions + figures.doubled_transactions;
    [
        (lost == 0 && figures.ledger_is_right, "transactions were lost in a move, or done twice"),
        (
            figures.monitor_bytes <= MONITOR_MAX,
            "the monitor takes more than 16 MiB beside the guest's memory",
        ),
        (
            figures.downtime_over_spare <= DOWNTIME_MAX,
            "a client waits more than 1.2 × as long as at a move to an equal spare",
        ),
        (
            figures.database.arrived_over_ordinary >= DATABASE_MIN,
            "PostgreSQL in a guest that has come has less than 0.95 × the throughput of an ordinary guest",
        ),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn database(arrived_over_ordinary: f64) -> Database {
        Database {
            arrived_instructions: 10_000,
            ordinary_instructions: 9_700,
            arrived_over_ordinary,
            noise: 0.012,
            samples: 5,
        }
    }

    fn figures() -> Figures {
        let one = |way, client_seconds| Move { way, client_seconds };
        let moves = vec![one(SPARE, 4.0), one(THERE, 9.0), one(BACK, 30.0), one(THERE, 4.4), one(THERE, 3.0)];
        Figures {
            round_trips: 3,
            transactions: 1234,
            lost_transactions: 0,
            doubled_transactions: 0,
            ledger_is_right: true,
            monitor_bytes: 5 << 20,
            downtime_over_spare: ratio(&moves),
            database: database(0.97),
            cpus: 1,
            emulator: "QEMU".into(),
            moves,
        }
    }

    #[test]
    fn a_run_that_does_not_end_leaves_its_figures() {
        let spare = [Move { way: SPARE, client_seconds: 4.0 }];
        let of = |trips, bytes, moves: &[Move]| SoFar::of(&database(0.97), trips, bytes, moves);
        let text = serde_json::to_string(&of(0, 0, &spare)).expect("JSON");
        assert!(text.contains(r#""downtime_over_spare":null"#) && text.contains(SPARE), "{text}");
        let text = serde_json::to_string(&of(2, 7, &figures().moves)).expect("JSON");
        assert!(text.contains(r#""round_trips":2,"monitor_bytes":7,"downtime_over_spare":1.1"#), "{text}");
    }

    #[test]
    fn each_promise_can_be_broken() {
        let good = figures();
        assert!((good.downtime_over_spare - 1.1).abs() < 1e-9);
        assert!(promises(&good).iter().all(|(kept, _)| *kept));
        let broken = [
            Figures { lost_transactions: 1, ..figures() },
            Figures { monitor_bytes: MONITOR_MAX + 1, ..figures() },
            Figures { downtime_over_spare: f64::NAN, ..figures() },
            Figures { database: database(0.949), ..figures() },
        ];
        for (number, figures) in broken.iter().enumerate() {
            let kept = promises(figures).map(|(kept, _)| kept);
            assert_eq!(kept.iter().filter(|kept| !**kept).count(), 1, "{number}");
            assert!(!kept[number]);
        }
        let text = section(&good);
        assert!(text.contains("**0 were lost, 0 were done twice**") && text.contains("5.0 MiB"), "{text}");
        assert!(text.contains("1,234 transactions") && text.contains("1.10 ×"), "{text}");
        assert!(text.contains("10,000") && text.contains("0.97 ×") && text.contains("1.2 %"), "{text}");
        assert!(text.ends_with(".\n") && !text.contains("\n\n\n"), "{text}");
    }
}
