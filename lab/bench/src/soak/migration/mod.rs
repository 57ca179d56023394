//! `lab soak --migration`: a machine with PostgreSQL on another machine's files moves to a spare, what it left is switched on
//! again as the next spare, and it moves back; and so on. Clients on a third machine are connected through all of it.
//!
//! Some of them keep a ledger: what they were told is committed must be there, once. The others are pgbench's, which gives a
//! client up when its connection breaks, and counts what it was told.

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

/// Who keep the ledger.
const CLIENTS: [&str; 2] = ["client0", "client1"];
/// pgbench's clients, and the transactions that they begin in a second, all together: an emulator cannot do many more, and what
/// is late because the machine stood still is made up for.
const PGBENCH: &str = "exec pgbench -h 10.9.0.2 -U root -n -c 4 -j 1 -R 4 -T 86400 bench";
/// Two rounds, and no limit that an emulator would miss anyway.
const OPTIONS: &str = "--rounds 2 --max-throttle 0";
/// So that the line can be read.
const DELAY: &str = "2s";
/// How long pgbench may take for what it has begun.
const ENDS_WITHIN: Duration = Duration::from_secs(120);

/// What is to be done.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    /// The kernel that moves.
    pub kernel: Kernel,
    /// Processors of the machines that it moves between.
    pub cpus: u32,
    /// Their memory.
    pub memory_mib: u32,
    /// How often.
    pub moves: u64,
    /// No more moves are begun when this has passed since the machines were at work.
    pub time: Option<Duration>,
}

/// `lab soak --migration`: runs it, keeps the record, and prints it.
///
/// # Errors
/// If a move fails, a connection breaks, or the ledger is not right.
pub fn command(plan: Plan) -> Result<()> {
    let (record, json) = run(plan)?.keep()?;
    println!("\n{}\n{json}", record::table_of(&[&record]));
    record.check()
}

/// `lab soak --migration --page`: the page of docs/ and the figures, of all records that were kept.
///
/// # Errors
/// If there are none, or a file cannot be written.
pub fn write_page() -> Result<()> {
    record::write_page()
}

/// Boots the machines and does it. What went wrong is in the record.
///
/// # Errors
/// If the machines cannot be had.
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

/// All machines at work.
struct Scene {
    switch: Switch,
    machine: Machine,
    /// The machine that was left, which is off.
    off: Option<Machine>,
    pgbench: Option<Background>,
    /// What pgbench has said in the end.
    complaints: String,
    history_before: u64,
}

impl Scene {
    fn set(plan: Plan) -> Result<Self> {
        let switch = Switch::boot()?;
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
        // Also where something else is wrong.
        record.broken_connections = self.broken();
        moved?;
        self.machine.check_next_attach()?;
        self.machine.ends_clean()
    }

    /// There and back, until all moves are made, and the ledger is compared.
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
            let (spare, words) =
                progress::step("the destination boots and waits", || self.spare(plan, place))?;
            let mut done = self.moves(spare, &words)?;
            progress::step("is all well? do the clients go on?", || {
                is_well(&self.machine, &id)?;
                goes_on(&self.machine, &self.switch.peer, self.pgbench.as_mut())
            })?;
            done.silence_ms = self.silence()?;
            println!("    {}; all of it {:.0} s", done.text(), begun.elapsed().as_secs_f32());
            record.moves.push(done);
        }
        self.finish(record)
    }

    /// A machine that waits for this one, and what this one is to be told. It comes up while the work is looked at.
    fn spare(&mut self, plan: Plan, place: u8) -> Result<(Machine, String)> {
        let (off, switch, spec) = (self.off.take(), &self.switch, at(&self.switch, plan, place));
        let prepared = thread::scope(|scope| {
            let prepares = scope.spawn(move || {
                let spare = match off {
                    Some(off) => off.start_as(spec)?,
                    None => switch.boot_other(spec)?,
                };
                let address = format!("10.9.0.1{place}");
                plug_in(&spare, &address)?;
                let words = receive_after(&spare, &address, DELAY)?;
                Ok((spare, words))
            });
            let goes_on = goes_on(&self.machine, &switch.peer, self.pgbench.as_mut());
            let prepared =
                prepares.join().unwrap_or_else(|_| Err(Error::Host("the spare's thread died".into())));
            goes_on.and(prepared)
        })?;
        self.switch.peer.sh("rm -f /run/client*.longest")?;
        Ok(prepared)
    }

    /// Moves to the spare, which is the machine then.
    fn moves(&mut self, spare: Machine, words: &str) -> Result<Move> {
        let mut line = Line::begin();
        let said = move_showing(&self.machine, &spare, words, OPTIONS, |text| line.show(text))?;
        drop(line);
        self.off = Some(mem::replace(&mut self.machine, spare));
        let words =
            last_words(&said).ok_or_else(|| Error::Host(format!("the machine's last words: {said}")))?;
        Ok(Move::of(&words))
    }

    /// The longest time in which a client that keeps the ledger had no answer, since the spare was ready.
    fn silence(&self) -> Result<u64> {
        let each = CLIENTS.iter().map(|client| {
            let text = self.switch.peer.sh(&format!("cat /run/{client}.longest"))?;
            text.trim().parse().map_err(|_| Error::Host(format!("{client} was silent for `{text}` ms")))
        });
        Ok(each.collect::<Result<Vec<u64>>>()?.into_iter().max().unwrap_or(0))
    }

    /// Has all clients end, and compares what they were told with what is there.
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

    /// Connections that did not outlast it, as those outside have seen.
    fn broken(&mut self) -> u64 {
        let broken = self.switch.peer.sh("ls /run/*.wrong 2> /dev/null | wc -l").unwrap_or_default();
        if let Some(pgbench) = &mut self.pgbench {
            self.complaints = pgbench.errors_so_far().unwrap_or_default();
        }
        let aborted = self.complaints.lines().filter(|line| line.contains("aborted")).count() as u64;
        aborted + broken.trim().parse::<u64>().unwrap_or(0)
    }
}

/// Native, and everybody content.
fn goes_on(machine: &Machine, peer: &Machine, pgbench: Option<&mut Background>) -> Result<()> {
    let status = machine.sh("mercury status --json")?;
    if status.contains("\"attached\"") {
        return Err(machine.blame(Error::Unhealthy(format!("it is not native: {status}"))));
    }
    comes_further(machine, "talk", count(machine, "talk")? + 5)?;
    for client in CLIENTS {
        comes_further(peer, client, count(peer, client)? + 2)?;
    }
    nothing_wrong(peer)?;
    let Some(pgbench) = pgbench else { return Ok(()) };
    let said = pgbench.errors_so_far()?;
    if pgbench.has_ended()? || said.contains("aborted") {
        return Err(Error::Unhealthy(format!("pgbench says {said}")));
    }
    Ok(())
}

/// The machine at one of the switch's places; with the driver that users have.
fn at(switch: &Switch, plan: Plan, place: u8) -> Spec {
    switch.plugged(plan.kernel, plan.cpus, plan.memory_mib, place).modules(Variant::Production)
}

/// How many of pgbench's transactions the database has.
fn history(machine: &Machine) -> Result<u64> {
    let text = machine.sh("psql -At bench -c 'select count(*) from pgbench_history'")?;
    text.trim().parse().map_err(|_| Error::Host(format!("pgbench's history has `{text}` rows")))
}
