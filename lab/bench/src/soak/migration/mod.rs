//! `lab soak --migration`: a machine with PostgreSQL on another machine's files moves to a
//! destination. The source is switched on again as the next destination, and the machine moves
//! back, and so on. Clients on a third machine stay connected through all of it.
//!
//! Some clients keep a ledger: transactions that they were told are committed must be in the
//! database, once. The others are pgbench's. pgbench gives a client up when its connection breaks,
//! and counts the answers that it got.

mod record;

use std::{
    mem, thread,
    time::{Duration, Instant},
};

pub use record::{Move, Pgbench, Record};

use crate::{demo::database, migration::last_words};
use mercury_lab::{
    command::Background,
    driver::Variant,
    error::{Error, Result},
    kernel::Kernel,
    ledger::{self, Ledger},
    live::{self, Line},
    machine::Machine,
    moving::{PEER, Switch, move_showing, plug_in, receive_after},
    progress,
    restart::{
        boot_id, comes_further, count, is_well, nothing_wrong, results,
        script::{CLIENT, CLOCK, TALK},
        start,
    },
    spec::{Platform, Spec},
};

/// The clients that keep the ledger.
const CLIENTS: [&str; 2] = ["client0", "client1"];
/// pgbench's clients, and the transactions that they all together begin in a second. An emulator
/// cannot do many more. Transactions that are late because the machine stood still are made up for.
const PGBENCH: &str = "exec pgbench -h 10.9.0.2 -U root -n -c 4 -j 1 -R 4 -T 86400 bench";
/// The options of a move: two rounds, and no limit, which an emulator would miss anyway.
const OPTIONS: &str = "--rounds 2 --max-throttle 0";
/// Delay in which the pairing token can be read.
const DELAY: &str = "2s";
/// Time limit for pgbench to finish the transactions that it has begun.
const ENDS_WITHIN: Duration = Duration::from_secs(120);

/// The amount of work.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    /// The kernel that moves.
    pub kernel: Kernel,
    /// Processors of the two machines between which it moves.
    pub cpus: u32,
    /// Memory of these machines.
    pub memory_mib: u32,
    pub moves: u64,
    /// The time after which no more moves begin, counted from the start of the work.
    pub time: Option<Duration>,
}

/// `lab soak --migration`: runs the soak, keeps the record, and prints it.
///
/// # Errors
/// If a move fails, a connection breaks, or the ledger is wrong.
pub fn command(plan: Plan) -> Result<()> {
    let (record, json) = run(plan)?.keep()?;
    println!("\n{}\n{json}", record::table_of(&[&record]));
    record.check()
}

/// `lab soak --migration --page`: writes the page of docs/ and the figures from all records that
/// were kept.
///
/// # Errors
/// If there are no records, or a file cannot be written.
pub fn write_page() -> Result<()> {
    record::write_page()
}

/// Boots the machines and runs the soak. The record has what went wrong.
///
/// # Errors
/// If the machines cannot be booted.
pub fn run(plan: Plan) -> Result<Record> {
    if Platform::chosen()? != Platform::Qemu {
        return Err(Error::Unsupported { reason: "Bochs has no network between machines" });
    }
    let Plan { kernel, cpus, memory_mib, moves, .. } = plan;
    live::say(&format!("{moves} moves with PostgreSQL: {kernel}, {cpus} CPUs, {memory_mib} MiB"));
    let mut record = Record::new(plan);
    let begun = Instant::now();
    let set = progress::step(
        "three machines: a switch with the files and the clients, and the one that moves",
        || Scene::set(plan),
    );
    let outcome = set.and_then(|mut scene| {
        scene.machine.kernel().clone_into(&mut record.kernel);
        scene.run(plan, &mut record)
    });
    record.failure = outcome.err().map(|error| error.to_string());
    record.minutes = (begun.elapsed().as_secs_f64() / 6.0).round() / 10.0;
    Ok(record)
}

struct Scene {
    switch: Switch,
    machine: Machine,
    /// The source of the last move, which is off.
    off: Option<Machine>,
    pgbench: Option<Background>,
    /// The complaints that pgbench printed at its end.
    complaints: String,
    history_before: u64,
}

impl Scene {
    fn set(plan: Plan) -> Result<Self> {
        let switch = Switch::boot_for(plan.kernel)?;
        let machine = switch.boot_moving(at(&switch, plan, 2))?;
        ledger::serve(&machine)?;
        start(&machine, "clock", CLOCK, "")?;
        start(&machine, "talk", TALK, PEER)?;
        machine.sh("modprobe -r kvm_amd 2> /dev/null || true")?;
        let history_before = history(&machine)?;
        for (number, name) in CLIENTS.iter().enumerate() {
            start(&switch.peer, name, CLIENT, &number.to_string())?;
        }
        let pgbench = Some(switch.peer.spawn(PGBENCH)?);
        Ok(Self { switch, machine, off: None, pgbench, complaints: String::new(), history_before })
    }

    fn run(&mut self, plan: Plan, record: &mut Record) -> Result<()> {
        let moved = self.go(plan, record);
        // The connections count also where something else is wrong.
        record.broken_connections = self.broken();
        moved?;
        self.machine.check_next_attach()?;
        self.machine.ends_clean()
    }

    /// Moves there and back, until all moves are made, and compares the ledger.
    fn go(&mut self, plan: Plan, record: &mut Record) -> Result<()> {
        let (id, at_work) = (boot_id(&self.machine)?, Instant::now());
        for number in 1..=plan.moves {
            if plan.time.is_some_and(|time| at_work.elapsed() >= time) {
                record.planned = number - 1;
                break;
            }
            let begun = Instant::now();
            let place = if number % 2 == 1 { 3 } else { 2 };
            live::say(&format!(
                "Move {number} of {}, {}",
                plan.moves,
                if place == 3 { "there" } else { "back" }
            ));
            let (destination, words) =
                progress::step("the destination boots and waits", || self.destination(plan, place))?;
            let mut done = self.moves(destination, &words)?;
            progress::step("checking the machine and its clients", || {
                is_well(&self.machine, &id)?;
                goes_on(&self.machine, &self.switch.peer, self.pgbench.as_mut())
            })?;
            done.silence_ms = self.silence()?;
            println!("    {}; all of it {:.0} s", done.text(), begun.elapsed().as_secs_f32());
            record.moves.push(done);
        }
        self.finish(record)
    }

    /// Starts a destination that waits for this machine. Returns it with the pairing token. The
    /// destination comes up while the work is checked.
    fn destination(&mut self, plan: Plan, place: u8) -> Result<(Machine, String)> {
        let (off, switch, spec) = (self.off.take(), &self.switch, at(&self.switch, plan, place));
        let prepared = thread::scope(|scope| {
            let prepares = scope.spawn(move || {
                let destination = match off {
                    Some(off) => off.start_as(spec)?,
                    None => switch.boot_other(spec)?,
                };
                let address = format!("10.9.0.1{place}");
                plug_in(&destination, &address)?;
                let words = receive_after(&destination, &address, DELAY)?;
                Ok((destination, words))
            });
            let goes_on = goes_on(&self.machine, &switch.peer, self.pgbench.as_mut());
            let prepared = prepares
                .join()
                .unwrap_or_else(|_| Err(Error::Host("the destination's thread panicked".into())));
            goes_on.and(prepared)
        })?;
        self.switch.peer.sh("rm -f /run/client*.longest")?;
        Ok(prepared)
    }

    /// Moves the machine to the destination, which runs it then.
    fn moves(&mut self, destination: Machine, words: &str) -> Result<Move> {
        let mut line = Line::begin();
        let said = move_showing(&self.machine, &destination, words, OPTIONS, |text| line.show(text))?;
        drop(line);
        self.off = Some(mem::replace(&mut self.machine, destination));
        let words = last_words(&said).ok_or_else(|| {
            Error::Host(format!("the machine's last words have no figures of the move: {said}"))
        })?;
        Ok(Move::of(&words))
    }

    /// Returns the longest time in which a client that keeps the ledger had no answer, since the
    /// destination was ready.
    fn silence(&self) -> Result<u64> {
        let each = CLIENTS.iter().map(|client| {
            let text = self.switch.peer.sh(&format!("cat /run/{client}.longest"))?;
            text.trim()
                .parse()
                .map_err(|_| Error::Host(format!("{client} reported `{text}` instead of milliseconds")))
        });
        Ok(each.collect::<Result<Vec<u64>>>()?.into_iter().max().unwrap_or(0))
    }

    /// Ends all clients, and compares the answers that they got with the database.
    fn finish(&mut self, record: &mut Record) -> Result<()> {
        let told = results(&self.switch.peer, &CLIENTS)?;
        let told: Vec<u64> = told.iter().filter_map(|count| count.parse().ok()).collect();
        record.ledger = Some(Ledger::of(&self.machine, &told)?);
        let Some(mut pgbench) = self.pgbench.take() else { return Ok(()) };
        database::stop(&mut pgbench)?;
        let output = pgbench.wait(ENDS_WITHIN)?;
        self.complaints.clone_from(&output.stderr);
        let report = output.check()?.stdout;
        let measured = database::result(&report)?;
        record.pgbench = Some(Pgbench {
            acknowledged: measured.done,
            failed: measured.failed,
            found: history(&self.machine)? - self.history_before,
            balances_agree: database::balances_agree(&self.machine)?,
        });
        Ok(())
    }

    /// Returns the number of broken connections, as the clients have seen.
    fn broken(&mut self) -> u64 {
        let broken = self.switch.peer.sh("ls /run/*.wrong 2> /dev/null | wc -l").unwrap_or_default();
        if let Some(pgbench) = &mut self.pgbench {
            self.complaints = pgbench.errors_so_far().unwrap_or_default();
        }
        let aborted = self.complaints.lines().filter(|line| line.contains("aborted")).count() as u64;
        aborted + broken.trim().parse::<u64>().unwrap_or(0)
    }
}

/// Checks that the machine runs natively and no work has an error.
fn goes_on(machine: &Machine, peer: &Machine, pgbench: Option<&mut Background>) -> Result<()> {
    let status = machine.sh("mercury status --json")?;
    if status.contains("\"attached\"") {
        return Err(machine.blame(Error::Unhealthy(format!("the machine is not native: {status}"))));
    }
    comes_further(machine, "talk", count(machine, "talk")? + 5)?;
    for client in CLIENTS {
        comes_further(peer, client, count(peer, client)? + 2)?;
    }
    nothing_wrong(peer)?;
    let Some(pgbench) = pgbench else { return Ok(()) };
    let said = pgbench.errors_so_far()?;
    if pgbench.has_ended()? || said.contains("aborted") {
        return Err(Error::Unhealthy(format!("pgbench reported an error: {said}")));
    }
    Ok(())
}

/// Describes the machine at one of the switch's places, with the driver that users have.
fn at(switch: &Switch, plan: Plan, place: u8) -> Spec {
    switch.plugged(plan.kernel, plan.cpus, plan.memory_mib, place).modules(Variant::Production)
}

/// Returns the number of pgbench's transactions in the database.
fn history(machine: &Machine) -> Result<u64> {
    let text = machine.sh("psql -At bench -c 'select count(*) from pgbench_history'")?;
    text.trim().parse().map_err(|_| Error::Host(format!("pgbench's history has `{text}` rows")))
}
