//! The template's part that keeps the host from running out of memory: balloons, and machines that sleep.
//!
//! The template does it because it alone can: it is the parent of its machines, has the sockets by which they
//! are stopped, and has the base of which a machine that wakes is a copy. It looks at the host's memory
//! ([`super::host`]), decides ([`super::policy`]), and does one thing after the other. What takes long is
//! done by a process of its own, one at a time ([`mercury_hosted::asleep`]).
//!
//! The keeper is not fast enough to save the host by what it does: machines fill memory faster than others
//! are written. So it divides what there is among them beforehand, and machines stand still by themselves
//! when they have their part ([`mercury_hosted::throttle`]). Then there is time to make room. If nobody makes
//! any, for want of a folder or of machines that may sleep, all go on.

use std::{
    fs::File,
    io,
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd},
        unix::{fs::OpenOptionsExt, net::UnixStream},
    },
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

use mercury_control::{
    error::{Error, Result},
    exit::Exit,
};
use mercury_guests::Name;
use mercury_hosted::{
    asleep::{Room, load, new_life, start_helper},
    control::save_image_as,
    fork,
};
use rustix::{param::clock_ticks_per_second, process::Pid};

use super::{
    asleep::Asleep,
    folder::{CONSOLE_INPUT, Folder},
    host::{Memory, Processes, Sources},
    job::{Abandoned, Job, Work, is_ready_within, make_note, say_why, silent_disk},
    map::Files,
    policy::{Account, Action, Candidate, Need, STUCK, TURN, divide, free_to_take, plan},
    protocol::Answer,
    server::{Beginning, Machine, Server, failed, note, open_console, reply, reply_all, seconds},
};
use crate::refused;

const PAGE: u64 = 4096;
/// The least memory that a machine keeps: what its user may leave it, and what is left to an idle one.
const LEAST: u64 = 32 << 20;
const LEAST_IDLE: u64 = 48 << 20;
/// The part of its memory that an idle machine keeps.
const IDLE_PART: u64 = 4;
/// The time between the end of a process's sockets and the process's own end, at most.
const DYING: Duration = Duration::from_millis(500);
/// The time between two looks: usually, when memory is short, and when a machine is on its way.
const USUALLY: Duration = Duration::from_secs(1);
const SOON: Duration = Duration::from_millis(100);
const AT_ONCE: Duration = Duration::from_millis(10);
/// The time between two measurements of machines' work.
const MEASURE: Duration = Duration::from_millis(500);
/// A machine works if it uses more than this part of a processor's time.
const WORKS: f64 = 0.05;
/// The time in which a machine's work may be that of its balloon.
const BALLOON_WORKS: Duration = Duration::from_secs(2);
/// The time after which something is tried again that has failed.
const AGAIN: Duration = Duration::from_secs(10);
/// The time between two divisions of memory, when machines stand still or grow, and otherwise.
const DIVIDE_SOON: Duration = Duration::from_millis(10);
const DIVIDE: Duration = Duration::from_millis(50);
/// The growth of all machines from which memory is divided again soon.
const GROWTH: u64 = 256 << 10;
/// The time after which machines stand still no longer if nobody makes room.
const NOBODY: Duration = Duration::from_secs(2);
/// The time after which no more pages of zeros are looked for.
const TRIM_MOST: Duration = Duration::from_secs(5);

/// The state of the template's keeper.
pub struct Keeper {
    sources: Sources,
    /// The folder for machines that are asleep.
    sleep_in: Option<PathBuf>,
    sleepers: Vec<Sleeper>,
    job: Option<Job>,
    /// Other processes that are to end.
    abandoned: Abandoned,
    next_look: Instant,
    measured: Option<Instant>,
    /// The time of the next division of memory, and the sum of what machines had at the last one.
    next_division: Instant,
    divided: u64,
    /// The last time at which room was made, or nobody stood still.
    made_room: Instant,
    /// The time since which machines stand still no longer, because nobody made room.
    lifted: Option<Instant>,
    /// The largest machine that could wake if all machines that may sleep were asleep, in bytes.
    could_wake: u64,
}

/// A machine that is asleep.
struct Sleeper {
    asleep: Asleep,
    /// The machine's keys, which wake it. They stay in the pipe.
    pipe: File,
    /// The time since which it is to wake.
    wanted: Option<Instant>,
    /// The clients that have asked for it.
    clients: Vec<UnixStream>,
    /// It is not tried before.
    not_before: Instant,
}

/// The keeper's view of a machine.
#[derive(Default)]
pub struct Kept {
    /// The pages that the machine's user wants to be in its balloon.
    balloon: u32,
    /// The time at which the balloon was made larger for the host.
    squeezed: Option<Instant>,
    is_settled: bool,
    /// The processor time that the machine had used when it was last measured.
    ticks: u64,
    /// The time since which it has not worked.
    idle_since: Option<Instant>,
    /// It worked when that was last measured.
    works: bool,
    /// The machine was told to end, because all of it is here.
    falls_asleep: Option<(Asleep, File)>,
    /// The machine has begun from here, and may not go on yet.
    origin: Option<Asleep>,
    /// The clients that wait until the machine has woken or is asleep.
    clients: Vec<UnixStream>,
    /// The clients for which it is to wake as soon as it is asleep.
    wakers: Vec<UnixStream>,
    /// True if it is to sleep whatever it does.
    must_sleep: bool,
    not_before: Option<Instant>,
    /// True if its memory is limited.
    is_limited: bool,
    /// The time since which it stands still at its limit.
    held_since: Option<Instant>,
    /// The time since which it is at work.
    turn_since: Option<Instant>,
}

impl Kept {
    /// Begins to keep a machine that may have been asleep.
    pub fn new(origin: Option<Asleep>) -> Self {
        let balloon = origin.as_ref().map_or(0, |asleep| asleep.balloon_pages);
        Self { origin, balloon, ..Self::default() }
    }

    fn idle(&self) -> Duration {
        self.idle_since.map_or(Duration::ZERO, |since| since.elapsed())
    }

    /// Returns the time for which it stands still at its limit.
    fn held(&self) -> Duration {
        self.held_since.map_or(Duration::ZERO, |since| since.elapsed())
    }

    /// Returns the time for which it is at work.
    fn turn(&self) -> Duration {
        self.turn_since.map_or(Duration::ZERO, |since| since.elapsed())
    }
}

/// The reason for which a machine falls asleep.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Why {
    /// Its user wants it.
    Ordered,
    /// It is idle.
    Idle,
    /// It makes room for others, and comes back by itself.
    Swapped,
}

impl Keeper {
    /// Returns true while another process writes or reads a machine of this name.
    pub(super) fn is_busy_with(&self, name: &Name) -> bool {
        self.job.as_ref().is_some_and(|job| job.is_of(name))
    }

    /// Takes over machines of the template that are asleep already.
    pub fn new(template: &Name, sleep_in: Option<PathBuf>) -> Result<Self> {
        let machines = Folder::machines();
        machines.end_attempts(template).map_err(|error| failed("find machines", error))?;
        let asleep = machines.all_asleep().map_err(|error| failed("find machines", error))?;
        if let Some(folder) = &sleep_in {
            remove_parts(folder).map_err(|error| failed("look into the folder for sleep", error))?;
        }
        let of_template = asleep.into_iter().filter(|one| one.template == *template);
        let sleepers = of_template.map(Sleeper::new).collect::<io::Result<_>>();
        Ok(Self {
            sources: Sources::default(),
            sleep_in,
            sleepers: sleepers.map_err(|error| failed("open a console", error))?,
            job: None,
            abandoned: Abandoned::default(),
            next_look: Instant::now(),
            measured: None,
            next_division: Instant::now(),
            divided: 0,
            made_room: Instant::now(),
            lifted: None,
            could_wake: u64::MAX,
        })
    }

    /// Returns true if another process works.
    pub fn has_job(&self) -> bool {
        self.job.is_some()
    }

    /// Returns the descriptors that are to be watched. That of the other process comes first.
    pub fn watched(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        let job = self.job.iter().map(Job::end);
        let is_open = |one: &&Sleeper| one.wanted.is_none() && one.not_before <= Instant::now();
        job.chain(self.sleepers.iter().filter(is_open).map(|one| one.pipe.as_fd()))
    }

    fn sleeper(&mut self, name: &Name) -> Option<&mut Sleeper> {
        self.sleepers.iter_mut().find(|one| one.asleep.name == *name)
    }

    /// Returns the machine that is to wake next: of those that the host could have room for, the one that has
    /// waited for the longest time.
    fn next_to_wake(&self) -> Option<&Sleeper> {
        let now = Instant::now();
        let may = |one: &&Sleeper| {
            one.wanted.is_some() && one.not_before <= now && one.asleep.own_bytes <= self.could_wake
        };
        self.sleepers.iter().filter(may).min_by_key(|one| one.wanted)
    }

    /// Returns true if another process works, and has not done so for too long.
    fn makes_progress(&self) -> bool {
        self.job.as_ref().is_some_and(Job::makes_room)
    }
}

impl Sleeper {
    fn new(asleep: Asleep) -> io::Result<Self> {
        let pipe = open_pipe(&asleep.name)?;
        Ok(Self::with_pipe(asleep, pipe, Instant::now()))
    }

    /// A machine that was at work is to wake.
    fn with_pipe(asleep: Asleep, pipe: File, not_before: Instant) -> Self {
        let wanted = asleep.at_work.then(Instant::now);
        Self { asleep, pipe, wanted, clients: Vec::new(), not_before }
    }
}

/// Removes the parts of machines that were being written when their template was killed. Those machines go
/// on, or have ended. A part that is being written is locked.
fn remove_parts(folder: &Path) -> io::Result<()> {
    for entry in std::fs::read_dir(folder)?.flatten() {
        let is_part = entry.file_name().to_str().is_some_and(|name| name.ends_with(".asleep.part"));
        if is_part
            && entry.file_type().is_ok_and(|kind| kind.is_file())
            && File::open(entry.path()).is_ok_and(|file| file.try_lock().is_ok())
        {
            std::fs::remove_file(entry.path())?;
        }
    }
    Ok(())
}

/// Opens the pipe of a machine's keys, without taking any.
fn open_pipe(name: &Name) -> io::Result<File> {
    let flags = rustix::fs::OFlags::NONBLOCK.bits().cast_signed();
    let path = Folder::machines().of(name).join(CONSOLE_INPUT);
    File::options().read(true).write(true).custom_flags(flags).open(path)
}

/// Removes pages of zeros, a part of all pages after the other, until the deadline. `trim` begins at a page,
/// and returns the page at which it has ended, and how many pages it has removed.
fn trim_all(pages: u64, deadline: Instant, mut trim: impl FnMut(u64) -> Option<(u64, u64)>) -> u64 {
    let (mut at, mut removed) = (0, 0);
    while at < pages
        && Instant::now() < deadline
        && let Some((next, some)) = trim(at)
    {
        removed += some;
        at = next;
    }
    removed
}

/// Returns true if a pipe has input.
fn has_input(pipe: &File) -> bool {
    is_ready_within(pipe, Duration::ZERO)
}

impl Server {
    /// Returns the time until there is something to do.
    pub(super) fn patience(&self) -> Option<Duration> {
        let keeper = &self.keeper;
        if self.machines.is_empty() && keeper.sleepers.is_empty() {
            return None;
        }
        if self.machines.iter().any(|one| one.kept.origin.is_some()) {
            return Some(AT_ONCE);
        }
        let next = keeper.next_look.min(keeper.next_division);
        Some(next.saturating_duration_since(Instant::now()))
    }

    /// Looks at the host's memory from time to time, and does what has to be done.
    pub(super) fn keep(&mut self) {
        self.greet_the_awake();
        self.keeper.abandoned.collect(&Folder::machines());
        self.give_up_silent_disk();
        let now = Instant::now();
        let mut is_called = false;
        for sleeper in self.keeper.sleepers.iter_mut().filter(|one| one.wanted.is_none()) {
            if sleeper.not_before <= now && has_input(&sleeper.pipe) {
                sleeper.wanted = Some(now);
                is_called = true;
            }
        }
        if self.machines.is_empty() && self.keeper.sleepers.is_empty() {
            self.keeper.made_room = now;
            return;
        }
        if now >= self.keeper.next_division {
            self.divide_memory(now);
        }
        if now < self.keeper.next_look && !is_called {
            return;
        }
        let memory = self.keeper.sources.memory();
        self.keeper.could_wake = self.could_wake(memory);
        let next = self.keeper.next_to_wake();
        let purpose = next.map(|one| one.asleep.own_bytes);
        let wanted = next.and_then(|one| one.wanted).map_or(Duration::ZERO, |since| since.elapsed());
        let missing = memory.map_or(0, |memory| memory.missing(purpose.unwrap_or(0)));
        let is_busy = missing > 0 || purpose.is_some() || self.keeper.has_job();
        self.keeper.next_look = now + if is_busy { SOON } else { USUALLY };
        let makes_room = self.obey_plan(memory, missing, wanted) || self.keeper.makes_progress();
        if makes_room {
            self.keeper.lifted = None;
        }
        let is_stuck = self.machines.iter().any(|one| one.kept.held() >= STUCK);
        if makes_room || !is_stuck {
            // What was done may have taken its time.
            self.keeper.made_room = Instant::now();
        }
        // One that wakes while others stand still would stand still, too.
        let is_held = is_stuck && wanted < TURN;
        if purpose.is_some()
            && !self.keeper.has_job()
            && !self.keeper.abandoned.wait_for_disk()
            && may_wake(memory, missing, makes_room || is_held || self.can_sleep())
        {
            self.begin_to_wake();
        }
    }

    /// Gives each machine a limit, of what the host has ([`mercury_hosted::throttle`]).
    pub(super) fn divide_memory(&mut self, now: Instant) {
        let memory = self.keeper.sources.memory();
        let taken = match &self.keeper.job {
            Some(Job { what: Work::Wake(asleep, room, _), .. }) => {
                asleep.own_bytes.saturating_sub(room.filled())
            }
            _ => self
                .keeper
                .next_to_wake()
                .filter(|one| one.wanted.is_some_and(|since| since.elapsed() >= TURN))
                .map_or(0, |one| one.asleep.own_bytes),
        };
        // Nobody makes room: machines go on for a while, and then somebody may make room again.
        if self.keeper.lifted.is_some_and(|since| now.saturating_duration_since(since) >= NOBODY) {
            (self.keeper.lifted, self.keeper.made_room) = (None, now);
        }
        let is_nobodys = now.saturating_duration_since(self.keeper.made_room) >= NOBODY;
        let is_short = memory.is_some_and(|memory| memory.missing(taken) > 0);
        self.keeper.lifted = self.keeper.lifted.or(is_nobodys.then_some(now)).filter(|_| is_short);
        let free = match memory {
            Some(memory) if self.keeper.lifted.is_none() => {
                free_to_take(memory.available, memory.reserve(), taken)
            }
            _ => u64::MAX,
        };
        let accounts: Vec<Account> = self.machines.iter().map(|one| self.account(one)).collect();
        let limits = divide(free, self.memory_bytes, &accounts);
        let (mut sum, mut is_held, mut is_limited) = (0_u64, false, false);
        let mut own = None;
        for ((machine, account), limit) in self.machines.iter_mut().zip(&accounts).zip(&limits) {
            let kept = &mut machine.kept;
            kept.held_since = if account.waits { kept.held_since.or(Some(now)) } else { None };
            is_held |= account.waits;
            is_limited |= limit.is_some();
            sum = sum.saturating_add(account.used);
            let limit = match limit {
                Some(_) if !kept.is_limited => {
                    // It has not counted what it has.
                    let own = own
                        .get_or_insert_with(|| Files::of(std::process::id()).unwrap_or_default().numbers());
                    let pid = machine.pid.as_raw_nonzero().get().cast_unsigned();
                    let used = Files::of(pid).map_or(0, |files| files.without(own).bytes());
                    machine.source.begin_account(used);
                    limit.map(|limit| limit.saturating_sub(account.used).saturating_add(used))
                }
                limit => *limit,
            };
            if limit.is_some() || kept.is_limited {
                machine.source.limit(limit);
            }
            kept.is_limited = limit.is_some();
        }
        let grown = sum.abs_diff(std::mem::replace(&mut self.keeper.divided, sum));
        self.keeper.next_division = now
            + match is_limited {
                false => USUALLY,
                true if is_held || grown >= GROWTH || self.keeper.has_job() => DIVIDE_SOON,
                true => DIVIDE,
            };
        if is_held {
            // Room must be made.
            self.keeper.next_look = self.keeper.next_look.min(now + SOON);
        }
    }

    /// Returns the size of the largest machine that could wake if all machines that may sleep were asleep.
    fn could_wake(&self, memory: Option<Memory>) -> u64 {
        let Some(memory) = memory else { return u64::MAX };
        let is_sleepy =
            self.keeper.sleep_in.is_some() && !self.template.has_disks() && !self.template.has_subnet();
        let machines =
            self.machines.iter().filter(|one| is_sleepy && one.is_detached && one.forward.is_empty());
        let theirs: u64 = machines.map(|one| one.source.account().used).sum();
        largest_to_wake(memory.available.saturating_add(theirs), memory.reserve())
    }

    fn account(&self, one: &Machine) -> Account {
        let account = one.source.account();
        // One that falls asleep needs no memory.
        let waits = account.waits && !self.falls_asleep(one);
        Account { used: account.used, waits, turn: one.kept.turn() }
    }

    /// Returns true if a machine may be put to sleep, at work or not.
    fn can_sleep(&self) -> bool {
        self.machines.iter().any(|one| self.candidate(one, 0, self.may_any_sleep()).may_sleep)
    }

    /// Returns true if machines may sleep, and none is on its way.
    fn may_any_sleep(&self) -> bool {
        self.keeper.sleep_in.is_some()
            && !self.template.has_disks()
            && !self.template.has_subnet()
            && !self.keeper.has_job()
            && !self.keeper.abandoned.wait_for_disk()
    }

    /// Does what the policy says. Returns true if room is made: a machine falls asleep, or a balloon grows.
    fn obey_plan(&mut self, memory: Option<Memory>, missing: u64, wanted: Duration) -> bool {
        let is_plenty = memory.is_none_or(Memory::is_plenty);
        if is_plenty && self.machines.iter().all(|one| one.kept.squeezed.is_none()) {
            self.keeper.measured = None;
        } else {
            self.measure();
        }
        self.settle_balloons();
        let can_sleep = self.may_any_sleep();
        let own = Files::of(std::process::id()).unwrap_or_default().numbers();
        let candidates: Vec<Candidate> = match is_plenty {
            true => self.machines.iter().map(|one| self.candidate(one, 0, false)).collect(),
            false => {
                let bytes = |pid: Pid| {
                    let pid = pid.as_raw_nonzero().get().cast_unsigned();
                    Files::of(pid).map_or(0, |files| files.without(&own).bytes())
                };
                self.machines.iter().map(|one| self.candidate(one, bytes(one.pid), can_sleep)).collect()
            }
        };
        let is_held = self.machines.iter().any(|one| one.kept.held_since.is_some());
        let is_urgent = is_held || memory.is_some_and(Memory::is_urgent);
        let actions = plan(Need { missing, is_urgent, is_plenty, wanted }, &candidates);
        let names: Vec<Name> = self.machines.iter().map(|one| one.name.clone()).collect();
        let mut squeezes = 0;
        for action in &actions {
            match *action {
                // A machine that stands still throws such orders away.
                Action::Squeeze(index) | Action::Release(index)
                    if self.falls_asleep(&self.machines[index]) => {}
                // Each takes a moment, in which nobody else gets memory.
                Action::Squeeze(_) if is_urgent && squeezes > 0 => {}
                Action::Squeeze(index) => {
                    self.squeeze(index);
                    squeezes += 1;
                }
                Action::Release(index) => self.release(index),
                Action::Sleep(_) | Action::Swap(_) => {}
            }
        }
        let chosen = actions.iter().find_map(|action| match action {
            Action::Sleep(index) => Some((names[*index].clone(), Why::Idle)),
            Action::Swap(index) => Some((names[*index].clone(), Why::Swapped)),
            _ => None,
        });
        let ordered = self
            .machines
            .iter()
            .find(|one| one.kept.must_sleep && one.kept.origin.is_none())
            .map(|one| (one.name.clone(), Why::Ordered));
        if let Some((name, why)) = ordered.or(chosen).filter(|_| !self.keeper.has_job()) {
            self.begin_to_sleep(&name, why);
        }
        let is_squeezed =
            |one: &Machine| one.kept.squeezed.is_some_and(|since| since.elapsed() < BALLOON_WORKS);
        self.machines.iter().any(|one| self.falls_asleep(one) || is_squeezed(one))
    }

    fn candidate(&self, one: &Machine, own_bytes: u64, can_sleep: bool) -> Candidate {
        let Kept { squeezed, not_before, .. } = &one.kept;
        let left = (self.memory_bytes / IDLE_PART).max(LEAST_IDLE);
        let is_free = !self.falls_asleep(one) && one.kept.origin.is_none();
        Candidate {
            idle: if is_free { one.kept.idle() } else { Duration::ZERO },
            works: one.kept.works,
            own_bytes,
            spare_bytes: self.memory_bytes.saturating_sub(left),
            squeezed: squeezed.map(|since| since.elapsed()),
            // A machine that the outside reaches by a port could not be reached in its sleep.
            may_sleep: can_sleep
                && is_free
                && one.is_detached
                && one.forward.is_empty()
                && not_before.is_none_or(|time| time <= Instant::now()),
            held: one.kept.held(),
            turn: one.kept.turn(),
        }
    }

    /// Measures how much machines work.
    fn measure(&mut self) {
        let now = Instant::now();
        let elapsed = self.keeper.measured.map(|before| now - before);
        if elapsed.is_some_and(|elapsed| elapsed < MEASURE) {
            return;
        }
        let processes = Processes::read(&self.keeper.sources);
        for machine in &mut self.machines {
            let ticks = processes.ticks(machine.pid.as_raw_nonzero().get().cast_unsigned());
            let used = ticks.saturating_sub(std::mem::replace(&mut machine.kept.ticks, ticks));
            let kept = &mut machine.kept;
            let is_measured = elapsed.is_some() && kept.idle_since.is_some();
            let part = used as f64
                / clock_ticks_per_second() as f64
                / elapsed.unwrap_or(MEASURE).as_secs_f64().max(MEASURE.as_secs_f64());
            let is_balloons = kept.squeezed.is_some_and(|since| since.elapsed() < BALLOON_WORKS);
            // One that stands still for want of memory would work.
            let is_held = kept.held() >= STUCK;
            kept.works = is_measured && (is_held || part > WORKS && !is_balloons);
            if !is_measured || kept.works {
                kept.idle_since = Some(now);
            }
            kept.turn_since = if kept.works { kept.turn_since.or(Some(now)) } else { None };
        }
        self.keeper.measured = Some(now);
    }

    /// Asks a machine for memory that the host needs.
    fn squeeze(&mut self, index: usize) {
        self.trim(index);
        let left = (self.memory_bytes / IDLE_PART).max(LEAST_IDLE);
        let pages = pages(self.memory_bytes.saturating_sub(left));
        let machine = &mut self.machines[index];
        let _ = machine.source.set_balloon(pages.max(machine.kept.balloon));
        (machine.kept.squeezed, machine.kept.is_settled) = (Some(Instant::now()), false);
    }

    /// Gives a machine back what the host has needed.
    fn release(&mut self, index: usize) {
        let machine = &mut self.machines[index];
        let _ = machine.source.set_balloon(machine.kept.balloon);
        machine.kept.squeezed = None;
    }

    /// Lets balloons be that have what they get: a kernel that has nothing to give would try again and again.
    fn settle_balloons(&mut self) {
        for machine in &mut self.machines {
            let is_due = machine.kept.squeezed.is_some_and(|since| since.elapsed() >= BALLOON_WORKS);
            if is_due && !std::mem::replace(&mut machine.kept.is_settled, true) {
                let (wanted, actual) = machine.source.balloon();
                if actual < wanted {
                    let _ = machine.source.set_balloon(actual.max(machine.kept.balloon));
                }
            }
        }
    }

    /// Removes a machine's pages of zeros. Returns their number. A machine that takes long keeps the rest:
    /// others wait for the template meanwhile.
    fn trim(&mut self, index: usize) -> u64 {
        let source = &mut self.machines[index].source;
        trim_all(self.memory_bytes / PAGE, Instant::now() + TRIM_MOST, |from| source.trim(from).ok())
    }

    /// Lets a machine have so much memory.
    pub(super) fn resize(&mut self, name: &Name, bytes: u64) -> Result<Answer> {
        if !(LEAST..=self.memory_bytes).contains(&bytes) {
            let (least, most) = (LEAST >> 20, self.memory_bytes >> 20);
            return Err(Error::new(
                Exit::Usage,
                format!("{name} can have {least} to {most} MiB, not {}", bytes >> 20),
            )
            .hint("the most is what the saved machine had; see `mercury disco resize --help`"));
        }
        let index = self.find_at_work(name)?;
        let zero_bytes = self.trim(index) * PAGE;
        let machine = &mut self.machines[index];
        let balloon_bytes = self.memory_bytes - bytes;
        machine.source.set_balloon(pages(balloon_bytes)).map_err(refused)?;
        (machine.kept.balloon, machine.kept.squeezed) = (pages(balloon_bytes), None);
        Ok(Answer::Resized { balloon_bytes, zero_bytes })
    }

    /// Returns true if a machine stands still to be written, or was told to end.
    pub(super) fn falls_asleep(&self, machine: &Machine) -> bool {
        let is_its = |job: &Job| matches!(&job.what, Work::Sleep(_, _, pid) if *pid == machine.pid);
        let is_written = self.keeper.job.as_ref().is_some_and(is_its);
        is_written || machine.kept.falls_asleep.is_some()
    }

    /// Puts a machine to sleep for a client, who is told when that is done.
    pub(super) fn sleep_for(&mut self, client: UnixStream, name: &Name) {
        let found = self.find_at_work(name).and_then(|index| self.may_sleep(index).map(|()| index));
        let found = found.and_then(|index| match self.machines[index].kept.origin {
            None => Ok(index),
            Some(_) => Err(Error::new(Exit::State, format!("{name} is waking up")).hint("try again")),
        });
        match found {
            Err(error) => reply(&client, Err(error)),
            Ok(index) => {
                let kept = &mut self.machines[index].kept;
                kept.clients.push(client);
                kept.must_sleep = true;
                self.keeper.next_look = Instant::now();
            }
        }
    }

    fn may_sleep(&self, index: usize) -> Result<()> {
        let machine = &self.machines[index];
        if !machine.is_detached {
            return Err(Error::new(Exit::State, format!("{} has its console on a terminal", machine.name))
                .hint("only machines in the background can sleep: `mercury disco run --detach`"));
        }
        if self.template.has_disks() {
            return Err(Error::new(Exit::State, format!("{} has disks in memory or a region", machine.name))
                .hint("machines with these cannot sleep yet"));
        }
        if self.template.has_subnet() {
            return Err(Error::new(Exit::State, format!("{} is on a subnet", machine.name))
                .hint("machines on a subnet cannot sleep yet"));
        }
        if self.keeper.sleep_in.is_none() {
            return Err(Error::new(Exit::State, format!("the template {} has no folder for it", self.name))
                .hint("make the template with --sleep-in FOLDER, a folder on a disk"));
        }
        if self.keeper.abandoned.wait_for_disk() {
            return Err(silent_disk());
        }
        Ok(())
    }

    /// Stops a machine, and starts a process that writes it.
    fn begin_to_sleep(&mut self, name: &Name, why: Why) {
        let Some(index) = self.machines.iter().position(|one| one.name == *name) else { return };
        self.machines[index].kept.must_sleep = false;
        if let Err(error) = self.may_sleep(index).and_then(|()| self.stop_for_sleep(index, why)) {
            self.stays_awake(index, error);
        }
    }

    fn stop_for_sleep(&mut self, index: usize, why: Why) -> Result<()> {
        let work = if why == Why::Idle { fork::Work::Idle } else { fork::Work::Any };
        let folder = self.keeper.sleep_in.clone().unwrap_or_default();
        let shared = Files::of(std::process::id()).unwrap_or_default().numbers();
        let machine = &mut self.machines[index];
        let name = machine.name.clone();
        let pipe = open_pipe(&name).map_err(|error| failed("open the console", error))?;
        let first = machine.pid;
        let pid = first.as_raw_nonzero().get().cast_unsigned();
        let life = new_life().map_err(refused)?;
        let number: String = life[..8].iter().map(|byte| format!("{byte:02x}")).collect();
        let asleep = Asleep {
            file: folder.join(format!("{name}-{number}.asleep")),
            life,
            template: self.name.clone(),
            number: machine.number,
            forward: machine.forward.clone(),
            own_bytes: Files::of(pid).map_or(0, |files| files.without(&shared).bytes()),
            balloon_pages: machine.kept.balloon,
            at_work: why == Why::Swapped,
            since: seconds(),
            name,
        };
        let (note, machines) = (make_note()?, Folder::machines());
        // The file is known before it is made.
        machines.announce_file(&asleep).map_err(|error| failed("write the machine's state", error))?;
        let held = machine.source.hold(&life, work).map_err(refused);
        let image = held.inspect_err(|_| machines.retract_file(&asleep))?.image;
        let files = image.files().iter().map(|file| file.as_raw_fd());
        let kept = files.chain([image.state_file().as_raw_fd(), note.as_raw_fd()]);
        let work = || save_image_as(&image, &asleep.file, &asleep.life).map(drop);
        let started = start_helper(kept, work, |error| say_why(&note, error)).map_err(refused);
        let what = Work::Sleep(asleep.clone(), pipe, first);
        let job = started.and_then(|pid| Job::watch(pid, note, what, self.memory_bytes));
        let job = job.inspect_err(|_| {
            self.machines[index].source.let_go();
            machines.remove_attempt(&asleep);
        });
        self.keeper.job = Some(job?);
        Ok(())
    }

    /// Says that a machine was not put to sleep. It is not tried again for a while.
    fn stays_awake(&mut self, index: usize, error: Error) {
        let kept = &mut self.machines[index].kept;
        let is_at_work = error.message == fork::AT_WORK;
        kept.not_before = Some(Instant::now() + if is_at_work { MEASURE } else { AGAIN });
        let clients = std::mem::take(&mut kept.clients);
        match clients[..] {
            [_, ..] => reply_all(&clients, &Err(error)),
            [] if is_at_work => kept.idle_since = Some(Instant::now()),
            [] => {
                let what = format!("cannot be put to sleep, and goes on: {}", error.message);
                let _ = note(&self.machines[index].name, &what);
            }
        }
    }

    /// Ends what another process has done.
    pub(super) fn finish_job(&mut self) {
        let Some(job) = self.keeper.job.take() else { return };
        let (what, done) = job.finish();
        self.keeper.next_look = Instant::now();
        match what {
            Work::Sleep(asleep, pipe, pid) => self.end_held(asleep, pipe, pid, done),
            Work::Wake(asleep, room, lock) => {
                let begun = done.and_then(|()| self.begin_again(&asleep, room, lock));
                if let Err(error) = begun {
                    self.sleeps_on(&asleep.name, error);
                }
            }
        }
    }

    /// Gives up a process whose disk does not answer. The machine goes on, or sleeps on. If the file is all
    /// that is left of it, the process has more time.
    fn give_up_silent_disk(&mut self) {
        let is_written = self.written_machine();
        let Some(job) = self.keeper.job.as_mut().filter(|job| job.is_overdue()) else { return };
        if matches!(job.what, Work::Sleep(..)) && is_written.is_none() {
            return job.extend();
        }
        self.give_up_job(silent_disk());
    }

    /// Returns the index of the machine that stands still to be written, unless its process has ended.
    fn written_machine(&self) -> Option<usize> {
        let Some(Job { what: Work::Sleep(_, _, pid), .. }) = &self.keeper.job else { return None };
        let index = self.machines.iter().position(|one| one.pid == *pid)?;
        (!is_ready_within(&self.machines[index].end, Duration::ZERO)).then_some(index)
    }

    /// Ends the other process. The machine that it writes goes on, and the one that it reads sleeps on.
    fn give_up_job(&mut self, why: Error) {
        let written = self.written_machine();
        let Some(job) = self.keeper.job.take() else { return };
        let (helper, what) = job.into_parts();
        match what {
            Work::Sleep(asleep, ..) => {
                self.keeper.abandoned.take(helper, Some(asleep));
                if let Some(index) = written {
                    self.machines[index].source.let_go();
                    self.stays_awake(index, why);
                }
            }
            Work::Wake(asleep, ..) => {
                self.keeper.abandoned.take(helper, None);
                self.sleeps_on(&asleep.name, why);
            }
        }
    }

    /// Ends what another process does, because the template ends: machines go on, and leave no file.
    pub(super) fn end_job(&mut self) {
        let is_written =
            |job: &Job| matches!(job.what, Work::Sleep(..)) && is_ready_within(&job.end(), Duration::ZERO);
        if self.keeper.job.as_ref().is_some_and(is_written) {
            self.finish_job();
        }
        self.give_up_job(
            Error::new(Exit::State, format!("the template {} ends", self.name))
                .hint("`mercury disco list` shows the machines"),
        );
        // The next template of this name removes what a disk that does not answer keeps.
        self.keeper.abandoned.await_all(&Folder::machines());
    }

    /// Ends a machine of which all is in a file, or lets it go on.
    fn end_held(&mut self, asleep: Asleep, pipe: File, pid: Pid, written: Result<()>) {
        let Some(index) = self.machines.iter().position(|one| one.pid == pid) else {
            self.keep_file(asleep, pipe, pid, written);
            return;
        };
        let machine = &mut self.machines[index];
        let ended = written.and_then(|()| {
            // From here on the file counts if the machine ends without having gone on.
            let known = Folder::machines().write_asleep(&asleep);
            known.map_err(|error| failed("write where the machine is", error))?;
            match machine.source.end_held() {
                // It was killed just before. Its mark says if it had gone on.
                Err(_) if is_ready_within(&machine.end, DYING) => Ok(()),
                told => told.map_err(refused),
            }
        });
        match ended {
            Ok(()) => machine.kept.falls_asleep = Some((asleep, pipe)),
            Err(error) => {
                machine.source.let_go();
                Folder::machines().forget_file(&asleep);
                Folder::machines().remove_attempt(&asleep);
                self.stays_awake(index, error);
            }
        }
    }

    /// Keeps the file of a machine whose process was killed while it was written: it is all that is left. A
    /// machine that ends by itself, or was told to, makes the file void.
    fn keep_file(&mut self, asleep: Asleep, pipe: File, pid: Pid, written: Result<()>) {
        let folder = Folder::machines();
        let kept = written.ok().and_then(|()| {
            let _lock = folder.claim_ended(&asleep.name, pid.as_raw_nonzero().get().cast_unsigned())?;
            let is_void = folder.has_left(&asleep.name, &asleep.life).ok()?;
            (!is_void).then(|| folder.write_asleep(&asleep).ok())?
        });
        if kept.is_none() {
            return folder.remove_attempt(&asleep);
        }
        let _ = note(&asleep.name, "was killed while it fell asleep, and is asleep");
        let not_before = Instant::now() + AGAIN;
        self.keeper.sleepers.push(Sleeper::with_pipe(asleep, pipe, not_before));
    }

    /// Returns true if a machine whose process has ended is in a file.
    pub(super) fn has_fallen_asleep(&mut self, machine: &mut Machine) -> bool {
        let clients = std::mem::take(&mut machine.kept.clients);
        let wakers = std::mem::take(&mut machine.kept.wakers);
        let folder = Folder::machines();
        let (asleep, pipe) = match (machine.kept.falls_asleep.take(), machine.kept.origin.take()) {
            (Some((asleep, pipe)), _) => (asleep, Some(pipe)),
            (None, Some(asleep)) => (asleep, None),
            (None, None) => {
                let error = Error::new(Exit::Failed, format!("{} ended before it was asleep", machine.name));
                let hint = "if its file becomes whole, `mercury disco list` shows it asleep";
                reply_all(&clients, &Err(error.hint(hint)));
                return false;
            }
        };
        match folder.has_left(&machine.name, &asleep.life) {
            Ok(false) => {}
            left => {
                // Without an answer the file stays, whether it counts or not.
                if left.is_ok() {
                    folder.forget_file(&asleep);
                }
                let error = Error::new(Exit::Failed, format!("{} has ended", machine.name));
                let error = Err(error.hint("the end of its console.log says how"));
                [clients, wakers].iter().for_each(|clients| reply_all(clients, &error));
                return false;
            }
        }
        let has_failed = pipe.is_none();
        let Ok(pipe) = pipe.map_or_else(|| open_pipe(&machine.name), Ok) else { return false };
        let not_before = Instant::now() + if has_failed { AGAIN } else { Duration::ZERO };
        let file = asleep.file.clone();
        self.keeper.sleepers.retain(|one| one.asleep.name != machine.name);
        let mut sleeper = Sleeper::with_pipe(asleep, pipe, not_before);
        if !wakers.is_empty() {
            sleeper.wanted.get_or_insert_with(Instant::now);
            sleeper.clients = wakers;
        }
        self.keeper.sleepers.push(sleeper);
        self.keeper.next_look = Instant::now();
        let answer = match has_failed {
            false => Ok(Answer::Asleep { file }),
            true => Err(Error::new(Exit::Failed, format!("{} could not go on, and sleeps", machine.name))
                .hint(format!("the end of its console.log says why ({})", file.display()))),
        };
        reply_all(&clients, &answer);
        true
    }

    /// Wakes a machine for a client, who is told when it goes on.
    pub(super) fn wake_for(&mut self, client: UnixStream, name: &Name) {
        let on_its_way = self.machines.iter().position(|one| one.name == *name && self.falls_asleep(one));
        let is_awake = self.machines.iter().any(|one| one.name == *name);
        let waits_for_disk = self.keeper.abandoned.wait_for_disk();
        match self.keeper.sleeper(name) {
            Some(_) if waits_for_disk => reply(&client, Err(silent_disk())),
            Some(sleeper) => {
                sleeper.wanted.get_or_insert_with(Instant::now);
                sleeper.clients.push(client);
                self.keeper.next_look = Instant::now();
            }
            None => match on_its_way {
                Some(index) => self.wake_on_its_way(client, index),
                None => {
                    let state = if is_awake { "awake" } else { "not asleep" };
                    let error = Error::new(Exit::State, format!("{name} is {state}"));
                    reply(&client, Err(error.hint("`mercury disco list` shows the machines")));
                }
            },
        }
    }

    /// Wakes a machine that falls asleep: it goes on at once if it was not told to end yet.
    fn wake_on_its_way(&mut self, client: UnixStream, index: usize) {
        let name = self.machines[index].name.clone();
        if self.machines[index].kept.falls_asleep.is_some() {
            self.machines[index].kept.wakers.push(client);
        } else if self.written_machine() == Some(index) {
            self.give_up_job(
                Error::new(Exit::State, format!("{name} was woken before it was asleep"))
                    .hint("`mercury disco sleep` puts it to sleep again"),
            );
            reply(&client, Ok(Answer::Started { machines: vec![name], pause_us: None }));
        } else {
            // Its process was killed: the file is all that is left.
            let error = Error::new(Exit::Busy, format!("{name} is being written to its file"));
            reply(&client, Err(error.hint("try again in a moment")));
        }
    }

    /// Removes a machine that is asleep.
    pub(super) fn discard(&mut self, name: &Name) -> Result<Answer> {
        let is_it = |one: &Sleeper| one.asleep.name == *name;
        let Some(index) = self.keeper.sleepers.iter().position(is_it) else {
            return Err(Error::new(Exit::State, format!("{name} is not asleep"))
                .hint("`mercury disco list` shows the machines"));
        };
        if self.keeper.abandoned.wait_for_disk() {
            return Err(silent_disk());
        }
        // A process that reads the machine must not start it any more.
        if let Some(job) = self.keeper.job.take_if(|job| job.is_of(name)) {
            let (helper, work) = job.into_parts();
            // The lock of the machine's folder, too, is given back.
            drop(work);
            self.keeper.abandoned.take(helper, None);
        }
        let sleeper = self.keeper.sleepers.remove(index);
        let folder = Folder::machines();
        let lock = folder.claim_asleep(name).map_err(|error| failed("lock the machine's folder", error))?;
        folder.forget_file(&sleeper.asleep);
        if lock.is_some() {
            folder.remove(name);
        }
        Ok(Answer::Gone)
    }

    /// Starts a process that reads the machine that is wanted first.
    fn begin_to_wake(&mut self) {
        let Some(asleep) = self.keeper.next_to_wake().map(|one| one.asleep.clone()) else { return };
        if let Err(error) = self.read_sleeper(&asleep) {
            self.sleeps_on(&asleep.name, error);
        }
    }

    fn read_sleeper(&mut self, asleep: &Asleep) -> Result<()> {
        let lock = Folder::machines()
            .claim_asleep(&asleep.name)
            .map_err(|error| failed("lock the machine's folder", error))?
            .ok_or_else(|| failed("lock the machine's folder", "another process has it"))?;
        let room = Room::new(self.memory_bytes).map_err(refused)?;
        let note = make_note()?;
        let base = Arc::clone(self.template.image());
        let files = base.files().iter().map(|file| file.as_raw_fd());
        let kept = files.chain(room.descriptors()).chain([note.as_raw_fd()]);
        let work = || load(&asleep.file, &asleep.life, &base, &room);
        let pid = start_helper(kept, work, |error| say_why(&note, error)).map_err(refused)?;
        let what = Work::Wake(asleep.clone(), room, lock);
        self.keeper.job = Some(Job::watch(pid, note, what, self.memory_bytes)?);
        Ok(())
    }

    /// Starts a machine that was read.
    fn begin_again(&mut self, asleep: &Asleep, room: Room, lock: File) -> Result<()> {
        let loaded = room.into_machine(self.template.image()).map_err(refused)?;
        let console = open_console(&asleep.name).map_err(|error| failed("open the console", error))?;
        let beginning = Beginning {
            image: loaded.image,
            woken: Some((loaded.own, asleep.clone())),
            forward: &asleep.forward,
            is_attached: false,
        };
        self.start((asleep.name.clone(), lock), console, beginning)?;
        let index = self.keeper.sleepers.iter().position(|one| one.asleep.name == asleep.name);
        let clients = index.map(|index| self.keeper.sleepers.remove(index).clients);
        if let Some(machine) = self.machines.last_mut() {
            machine.kept.clients = clients.unwrap_or_default();
        }
        Ok(())
    }

    /// Says that a machine could not wake. It is not tried again for a while.
    fn sleeps_on(&mut self, name: &Name, error: Error) {
        let Some(sleeper) = self.keeper.sleeper(name) else { return };
        sleeper.wanted = sleeper.asleep.at_work.then(Instant::now);
        sleeper.not_before = Instant::now() + AGAIN;
        let _ = note(name, &format!("sleeps on: {}", error.message));
        reply_all(&std::mem::take(&mut sleeper.clients), &Err(error));
    }

    /// Finds machines that have gone on, whose files do not count any more.
    fn greet_the_awake(&mut self) {
        let folder = Folder::machines();
        for machine in &mut self.machines {
            let has_left =
                |asleep: &mut Asleep| folder.has_left(&machine.name, &asleep.life).unwrap_or(false);
            let Some(asleep) = machine.kept.origin.take_if(has_left) else { continue };
            folder.forget_file(&asleep);
            self.keeper.sleepers.retain(|one| one.asleep.name != machine.name);
            let _ = machine.source.set_balloon(machine.kept.balloon);
            let answer = Ok(Answer::Started { machines: vec![machine.name.clone()], pause_us: None });
            reply_all(&std::mem::take(&mut machine.kept.clients), &answer);
        }
    }
}

/// Returns true if a machine that is asleep may come back: the host has memory for it, or no machine can make
/// room and there is a part of the reserve. `is_sleepy` says that one can.
fn may_wake(memory: Option<Memory>, missing: u64, is_sleepy: bool) -> bool {
    missing == 0 || !is_sleepy && memory.is_some_and(|memory| missing < memory.reserve() / 2)
}

/// Returns the size of the largest machine that may wake where so much memory is available.
fn largest_to_wake(available: u64, reserve: u64) -> u64 {
    available.saturating_sub(reserve / 2)
}

/// Returns a number of bytes in pages of a balloon.
fn pages(bytes: u64) -> u32 {
    u32::try_from(bytes / PAGE).unwrap_or(u32::MAX)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_that_trims_slowly_or_not_at_all_holds_nobody_up() {
        let later = Instant::now() + Duration::from_secs(60);
        assert_eq!(trim_all(10, later, |from| Some((from + 4, 2))), 6);
        assert_eq!(trim_all(10, later, |from| (from < 4).then_some((from + 4, 2))), 2);
        let (soon, mut asked) = (Instant::now() + Duration::from_millis(50), 0);
        let slow = |from| {
            std::thread::sleep(Duration::from_millis(20));
            asked += 1;
            Some((from + 1, 0))
        };
        assert_eq!(trim_all(1 << 20, soon, slow), 0);
        assert!((1..=3).contains(&asked));
    }

    #[test]
    fn parts_that_nobody_writes_are_removed() {
        let directory = tempfile::tempdir().unwrap();
        let [left, written, whole] =
            ["a-1.asleep.part", "a-2.asleep.part", "a-3.asleep"].map(|name| directory.path().join(name));
        let [_, locked, _] = [&left, &written, &whole].map(|path| File::create(path).unwrap());
        locked.lock().unwrap();
        remove_parts(directory.path()).unwrap();
        assert_eq!([left, written, whole].map(|path| path.exists()), [false, true, true]);
    }

    /// A machine that cannot wake, whoever sleeps, holds up nobody.
    #[test]
    fn a_machine_is_wanted_only_if_the_host_could_have_room() {
        let (available, reserve) = (80 << 20, 64 << 20);
        assert_eq!(largest_to_wake(available, reserve), 48 << 20);
        assert_eq!(largest_to_wake(1 << 20, reserve), 0);
        let memory = Memory { total: 512 << 20, available, is_stalled: false };
        let largest = largest_to_wake(available, memory.reserve());
        assert!(may_wake(Some(memory), memory.missing(largest - 1), false));
    }

    #[test]
    fn a_machine_comes_back_when_there_is_room_or_nobody_makes_any() {
        let memory = |available| Some(Memory { total: 1 << 30, available, is_stalled: false });
        assert!(may_wake(None, 0, false) && may_wake(memory(1 << 30), 0, true));
        assert!(!may_wake(memory(1 << 20), 1, true), "another one falls asleep");
        assert!(may_wake(memory(1 << 20), 1 << 20, false));
        assert!(!may_wake(memory(1 << 20), 1 << 30, false), "the host has none");
    }
}
