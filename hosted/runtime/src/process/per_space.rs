//! Homes: a process of the host's for each address space of the guest's, with kernel, programs and monitor in it.
//!
//! A process has one address space. If all of a guest's were to share one, what programs have mapped would have to go at each
//! change, and come back fault by fault. Here an address space has a process where it stays mapped, its home; a change of CR3
//! is a change of the process. The homes are copies of the first process, which has the devices and never runs the guest.
//!
//! One of all these processes has the turn; the others wait. What the guest's processor has is in memory that they share: the
//! block, with the guest's registers, and [`Vcpu`](crate::vcpu::Vcpu). Each has its own monitor, which knows what is mapped there. What takes
//! devices, time or the terminal a home asks the first process for ([`Request`]). What happens to the kernel's own addresses, or to
//! pages of which there are copies with rewritten system calls, is written down for the others ([`Event`]), who
//! do it before they let the guest run.
//!
//! The guest's kernel is shown process-context identifiers, by which it says what a processor may keep; [`Tags`] decides when what is
//! mapped in a home has to be compared with the page tables.

use std::{
    cell::UnsafeCell,
    mem::size_of,
    ptr,
    sync::atomic::{AtomicBool, AtomicI32, AtomicU32, Ordering},
};

use iced_x86::Instruction;

use crate::{
    devices::now,
    error::{Error, Result},
    layout::PAGE,
    machine::End,
    memory::Memory,
    process::{
        self, Common, Fork, map_common,
        tags::{Found, Tags},
    },
    signal, smp,
};

/// Homes at most: more address spaces than that take turns. Each has a bit for each page.
const MOST: usize = 31;
/// The bit of a page of which there may be copies.
const COPIED: u32 = 1 << MOST;
/// Threads at most: of six disks, the network card and the terminal, and some to spare.
const THREADS: usize = 12;
/// Events that are remembered: who has missed more begins anew.
const EVENTS: usize = 256;
/// Bytes of a reason.
const REASON: usize = 1024;

/// What a home asks the first process for.
#[derive(Clone, Copy, Debug)]
pub enum Request {
    /// To look at what waits, and deliver an interrupt if the guest takes it.
    Service,
    /// To do what this instruction does; the guest's instruction pointer is already behind it.
    Emulate(Instruction),
    /// To do the guest's access to a device's register, at this physical address.
    Access(u64),
    /// To end the machine; why is in the turn.
    End(End),
}

/// What one home has done that others have to do, too, before the guest runs there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// The translation of an address of the kernel's was dropped.
    KernelPageDropped(u64),
    /// All translations of the kernel's were dropped.
    KernelDropped,
    /// A page has a copy somewhere: the kernel's writes to it are to be noticed.
    Copied(u64),
    /// A page with a copy may have been written to.
    Written(u64),
}

/// What the one that has the turn may use.
#[derive(Debug)]
struct Turn {
    request: Option<Request>,
    /// The number of the home that the guest's address space has.
    space: usize,
    tags: Tags,
    events: [Event; EVENTS],
    /// How many there have been.
    happened: u64,
    /// How many of them each process has taken.
    taken: [u64; MOST + 1],
    /// The guest's instruction pointer, and what of it the guest is to see.
    seen: (u64, u64),
    reason: [u8; REASON],
    reason_length: usize,
    /// Which of the host's processors each process is bound to.
    bound: [Option<usize>; MOST + 1],
    /// When the first one was last bound to none, by the host's clock.
    unbound_ns: u64,
    counters: Counters,
}

/// What has been counted.
#[derive(Clone, Copy, Debug, Default)]
pub struct Counters {
    /// Changes of the process from one home to another.
    pub moves: u64,
    /// Requests to the first process.
    pub requests: u64,
    /// Address spaces that got another's home.
    pub taken_over: u64,
    /// Comparisons with the page tables.
    pub compared: u64,
    /// Processes bound to another one of the host's processors.
    pub bound: u64,
}

#[repr(C, align(64))]
#[derive(Debug)]
struct Gate {
    /// Whether its process has been given the turn.
    is_open: AtomicU32,
    process: AtomicI32,
    ready: AtomicU32,
}

/// What all processes see.
#[derive(Debug)]
struct Shared {
    /// The first process', then the homes'.
    gates: [Gate; MOST + 1],
    /// Whose turn it is.
    active: AtomicU32,
    /// All processes are there.
    complete: AtomicU32,
    /// The host's processors, if there is a choice.
    processors: Option<libc::cpu_set_t>,
    turn: UnsafeCell<Turn>,
    /// There is a reference to it.
    is_turn_used: AtomicBool,
}

// SAFETY: Gates are atomic, and only the one that has the turn uses what goes with it.
unsafe impl Sync for Shared {}

impl Shared {
    fn new() -> Self {
        let gate =
            || Gate { is_open: AtomicU32::new(0), process: AtomicI32::new(0), ready: AtomicU32::new(0) };
        let turn = Turn {
            request: None,
            space: 0,
            tags: Tags::new(0),
            events: [Event::KernelDropped; EVENTS],
            happened: 0,
            taken: [0; MOST + 1],
            seen: (0, 0),
            reason: [0; REASON],
            reason_length: 0,
            bound: [None; MOST + 1],
            unbound_ns: 0,
            counters: Counters::default(),
        };
        Self {
            gates: std::array::from_fn(|_| gate()),
            active: AtomicU32::new(0),
            complete: AtomicU32::new(0),
            processors: processors(),
            turn: UnsafeCell::new(turn),
            is_turn_used: AtomicBool::new(false),
        }
    }
}

/// A process' way to the others: the first one's has the number 0, homes have the numbers from 1 on.
#[derive(Clone, Copy, Debug)]
pub struct SpaceProcess {
    number: usize,
    count: usize,
    shared: &'static Shared,
    /// By page of the guest's memory: which homes have it mapped to be written to, and [`COPIED`].
    pages: &'static [AtomicU32],
}

impl SpaceProcess {
    /// Makes the homes, `most` at most, which are copies of this process: there must be no threads yet. Gives, in each, which one it
    /// is; nothing if there is to be none, or the host lets this user have no more processes.
    ///
    /// # Errors
    /// If the host refuses memory.
    pub fn multiply(memory: &Memory, most: u64) -> Result<Option<Self>> {
        let shared = Common::new(Shared::new())?.share();
        let count = (memory.size() / PAGE) as usize;
        let pages = map_common(count * size_of::<AtomicU32>())?;
        // SAFETY: The memory stays, is as long, and zero, which is a valid value; all of it is atomic.
        let pages = unsafe { std::slice::from_raw_parts(pages.cast::<AtomicU32>(), count) };
        let mut first = Self { number: 0, count: 0, shared, pages };
        // SAFETY: It takes nothing.
        let own = unsafe { libc::getpid() };
        shared.gates[0].process.store(own, Ordering::Release);
        let mut processes = Vec::new();
        for number in 1..=MOST.min(usize::try_from(most).unwrap_or(MOST)) {
            match process::fork() {
                Fork::Child => return Self { number, ..first }.begin().map(Some),
                Fork::Parent(pid) => processes.push(pid),
                Fork::Refused => {
                    // The host limits a user's processes: fewer homes will do, but devices need threads.
                    let kept = processes.len().saturating_sub(THREADS);
                    processes.drain(kept..).for_each(end_child);
                    break;
                }
            }
        }
        for (gate, pid) in shared.gates[1..].iter().zip(&processes) {
            gate.process.store(*pid, Ordering::Release);
            signal::watch_child(*pid);
        }
        shared.complete.store(1, Ordering::Release);
        process::wake(&shared.complete);
        first.count = processes.len();
        if first.count == 0 {
            return Ok(None);
        }
        first.turn(|turn| turn.tags = Tags::new(first.count));
        Ok(Some(first))
    }

    /// In the new process: waits until all of them are known.
    fn begin(self) -> Result<Self> {
        process::begin(self.shared.gates[0].process.load(Ordering::Acquire), c"mercury-space")?;
        while self.shared.complete.load(Ordering::Acquire) == 0 {
            process::wait(&self.shared.complete, 0);
        }
        Ok(self)
    }

    /// Says that this process is prepared.
    pub fn is_ready(&self) {
        let gate = self.own();
        gate.ready.store(1, Ordering::Release);
        process::wake(&gate.ready);
    }

    /// Waits until all homes are prepared.
    ///
    /// # Errors
    /// If one of them has ended before.
    pub fn await_others(&self) -> Result<()> {
        match self.shared.gates[1..=self.count]
            .iter()
            .all(|gate| process::await_ready(&gate.ready, &gate.process))
        {
            true => Ok(()),
            false => Err(Error::host("a process for an address space could not be started")),
        }
    }

    /// The processes of all of them.
    #[must_use]
    pub fn processes(&self) -> Vec<u32> {
        let processes = self.shared.gates.iter().map(|gate| gate.process.load(Ordering::Acquire));
        processes.filter(|process| *process != 0).map(i32::cast_unsigned).collect()
    }

    /// Whether there are fewer homes than there could be.
    #[must_use]
    pub fn are_few(&self) -> bool {
        self.count < MOST
    }

    /// How many there are.
    #[must_use]
    pub fn count(&self) -> usize {
        self.count
    }

    /// Whether it is the first process, which has the devices and does not run the guest.
    #[must_use]
    pub fn is_first(&self) -> bool {
        self.number == 0
    }

    fn own(&self) -> &'static Gate {
        &self.shared.gates[self.number]
    }

    /// Uses what goes with the turn. `what` does not come here again.
    fn turn<R>(&self, what: impl FnOnce(&mut Turn) -> R) -> R {
        let is_used = &self.shared.is_turn_used;
        assert!(!is_used.load(Ordering::Relaxed), "the turn is used twice: this is a bug");
        is_used.store(true, Ordering::Relaxed);
        // SAFETY: Only the process that has the turn asks for this, in its one thread that runs the monitor; the mark forbids a second
        // reference there. It hands the turn over by a gate, which orders what each process has written.
        let result = what(unsafe { &mut *self.shared.turn.get() });
        is_used.store(false, Ordering::Relaxed);
        result
    }

    /// What has been counted.
    #[must_use]
    pub fn counters(&self) -> Counters {
        self.turn(|turn| turn.counters)
    }

    /// Asks the first process for something before the guest goes on, unless it is asked already: it looks at what waits then, too.
    pub fn ask(&self, request: Request) {
        self.turn(|turn| {
            turn.request.get_or_insert(request);
        });
    }

    /// What the first process is asked for.
    #[must_use]
    pub fn take_request(&self) -> Option<Request> {
        self.turn(|turn| turn.request.take())
    }

    /// Whether the guest cannot just go on here: another process is next, or something has to be compared first.
    #[must_use]
    pub fn is_left(&self) -> bool {
        self.is_elsewhere() || self.turn(|turn| turn.tags.is_stale(self.number - 1))
    }

    /// Returns true if another process goes on with the guest.
    #[must_use]
    pub fn is_elsewhere(&self) -> bool {
        self.next() != self.number
    }

    fn next(&self) -> usize {
        self.turn(|turn| if turn.request.is_some() { 0 } else { turn.space })
    }

    /// The guest's instruction pointer, and what of it the guest is to see, when the first process is asked.
    pub fn show(&self, rip: u64, visible: u64) {
        self.turn(|turn| turn.seen = (rip, visible));
    }

    /// What the guest is to see of its instruction pointer.
    #[must_use]
    pub fn visible(&self, rip: u64) -> u64 {
        let (shown, visible) = self.turn(|turn| turn.seen);
        if shown == rip { visible } else { rip }
    }

    /// Asks the first process to end the machine, whatever it was asked for before, and says why.
    pub fn demand_end(&self, how: End, why: &str) {
        let length = why.floor_char_boundary(REASON);
        self.turn(|turn| {
            turn.request = Some(Request::End(how));
            turn.reason[..length].copy_from_slice(&why.as_bytes()[..length]);
            turn.reason_length = length;
        });
    }

    /// Why the machine ends.
    #[must_use]
    pub fn reason(&self) -> String {
        self.turn(|turn| String::from_utf8_lossy(&turn.reason[..turn.reason_length.min(REASON)]).into_owned())
    }

    /// Hands the turn to whoever has to go on, and waits until it comes back. `None` if a process has ended meanwhile.
    #[must_use]
    pub fn hand_over(&self) -> Option<()> {
        let to = self.next();
        self.turn(|turn| match to == 0 || self.number == 0 {
            true => turn.counters.requests += u64::from(to == 0),
            false => turn.counters.moves += 1,
        });
        self.bind(to);
        let gate = &self.shared.gates[to];
        self.shared.active.store(to as u32, Ordering::SeqCst);
        gate.is_open.store(1, Ordering::Release);
        process::wake(&gate.is_open);
        self.await_turn()
    }

    /// Binds a process to the host's processor that this one is on, for it goes on when this one waits: on another processor,
    /// which sleeps, it would only come late. From time to time the first process is bound to none, so that the host chooses
    /// where all of them are.
    fn bind(&self, to: usize) {
        let Some(all) = &self.shared.processors else { return };
        if let Some(set) = self.turn(|turn| Self::choose_processors(turn, to, all)) {
            self.set_processors(to, &set);
        }
    }

    /// Returns the host's processors that a process is to be bound to, unless that is so already.
    fn choose_processors(turn: &mut Turn, to: usize, all: &libc::cpu_set_t) -> Option<libc::cpu_set_t> {
        const CHOICE_NS: u64 = 10_000_000;
        if to == 0 && now().saturating_sub(turn.unbound_ns) > CHOICE_NS {
            (turn.unbound_ns, turn.bound[0]) = (now(), None);
            return Some(*all);
        }
        // SAFETY: It takes nothing.
        let here = usize::try_from(unsafe { libc::sched_getcpu() }).ok()?;
        if turn.bound[to] == Some(here) || here >= libc::CPU_SETSIZE as usize {
            return None;
        }
        (turn.bound[to], turn.counters.bound) = (Some(here), turn.counters.bound + 1);
        // SAFETY: All zeros are a valid set, and the number is below its size.
        let only = unsafe {
            let mut set: libc::cpu_set_t = std::mem::zeroed();
            libc::CPU_SET(here, &mut set);
            set
        };
        Some(only)
    }

    /// If it fails the host chooses, as it would anyway.
    fn set_processors(&self, of: usize, set: &libc::cpu_set_t) {
        let process = self.shared.gates[of].process.load(Ordering::Acquire);
        // SAFETY: The set is one.
        unsafe { libc::sched_setaffinity(process, size_of_val(set), set) };
    }

    /// Waits for the turn. `None` if a process has ended meanwhile.
    #[must_use]
    pub fn await_turn(&self) -> Option<()> {
        let own = &self.own().is_open;
        while own.swap(0, Ordering::Acquire) == 0 {
            if signal::is_child_gone() {
                return None;
            }
            process::wait_for(own, 0, PATIENCE_NS);
        }
        Some(())
    }

    /// CR3 was written: `flush` unless translations are to be kept.
    pub fn load(&self, cr3: u64, flush: bool) {
        self.turn(|turn| {
            turn.tags.load(cr3, flush);
            turn.space = 1 + match turn.tags.choose(cr3) {
                Found::Own(index) => index,
                Found::Other(index) => {
                    turn.counters.taken_over += 1;
                    turn.tags.make_stale(index);
                    index
                }
            };
        });
    }

    /// All translations of programs were dropped.
    pub fn flush_all(&self) {
        self.turn(|turn| turn.tags.flush_all());
    }

    /// Whether what is mapped here has to be compared with the page tables; it is then as it should be.
    #[must_use]
    pub fn take_stale(&self) -> bool {
        self.turn(|turn| {
            let is_stale = turn.tags.take_stale(self.number - 1);
            turn.counters.compared += u64::from(is_stale);
            is_stale
        })
    }

    /// Others have to do something, too.
    pub fn tell(&self, event: Event) {
        self.turn(|turn| {
            debug_assert!(turn.taken[self.number] == turn.happened);
            turn.events[turn.happened as usize % EVENTS] = event;
            turn.happened += 1;
            turn.taken[self.number] = turn.happened;
        });
        let page = |physical: u64| self.pages.get((physical / PAGE) as usize);
        match event {
            Event::Copied(physical) => page(physical).map(|page| page.fetch_or(COPIED, Ordering::Relaxed)),
            Event::Written(physical) => page(physical).map(|page| page.fetch_and(!COPIED, Ordering::Relaxed)),
            _ => None,
        };
    }

    /// What has happened since this process had the turn; `None` if that is not remembered any more.
    #[must_use]
    pub fn take_events(&self) -> Option<Vec<Event>> {
        self.turn(|turn| {
            let from = std::mem::replace(&mut turn.taken[self.number], turn.happened);
            let at = |number: u64| turn.events[number as usize % EVENTS];
            (turn.happened - from <= EVENTS as u64).then(|| (from..turn.happened).map(at).collect())
        })
    }

    fn bit(&self) -> u32 {
        1 << (self.number - 1)
    }

    /// Sets whether this home has pages mapped to be written to: a range of physical addresses.
    pub fn set_writer(&self, physical: std::ops::Range<u64>, is_one: bool) {
        let (from, to) = ((physical.start / PAGE) as usize, physical.end.div_ceil(PAGE) as usize);
        for page in self.pages.get(from..to.min(self.pages.len())).unwrap_or(&[]) {
            match is_one {
                true => page.fetch_or(self.bit(), Ordering::Relaxed),
                false => page.fetch_and(!self.bit(), Ordering::Relaxed),
            };
        }
    }

    /// Whether another home has a page mapped to be written to.
    #[must_use]
    pub fn has_other_writer(&self, physical: u64) -> bool {
        let page = self.pages.get((physical / PAGE) as usize);
        page.is_none_or(|page| page.load(Ordering::Relaxed) & !(self.bit() | COPIED) != 0)
    }

    /// Pages of which there may be copies: physical addresses.
    pub fn copied(&self) -> impl Iterator<Item = u64> {
        let copied = self.pages.iter().zip((0..).step_by(PAGE as usize));
        copied.filter(|(page, _)| page.load(Ordering::Relaxed) & COPIED != 0).map(|(_, physical)| physical)
    }

    /// In the first process, from a signal's handler: interrupts the home that has the turn.
    pub fn interrupt(&self, is_urgent: bool) {
        let active = self.shared.active.load(Ordering::SeqCst) as usize;
        if self.number != 0 || active == 0 {
            return;
        }
        let process = self.shared.gates[active].process.load(Ordering::Acquire);
        let signal = if is_urgent { smp::CALL } else { libc::SIGUSR1 };
        // SAFETY: All take numbers; the interrupted code may be about to look at the error's number.
        unsafe {
            let error = *libc::__errno_location();
            libc::syscall(libc::SYS_tgkill, process, process, signal);
            *libc::__errno_location() = error;
        }
    }
}

/// The host's processors that this process may be on, if they are more than one.
fn processors() -> Option<libc::cpu_set_t> {
    // SAFETY: All zeros are a valid set, which is written by the call.
    unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        let is_known = libc::sched_getaffinity(0, size_of_val(&set), &raw mut set) == 0;
        (is_known && libc::CPU_COUNT(&set) > 1).then_some(set)
    }
}

fn end_child(pid: i32) {
    // SAFETY: It is a child of this process, which is not asked for its status.
    unsafe {
        libc::kill(pid, libc::SIGKILL);
        libc::waitpid(pid, ptr::null_mut(), 0);
    }
}

/// Whether a process has ended is looked at so often while waiting.
const PATIENCE_NS: i64 = 100_000_000;

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::sync::atomic::AtomicU64;

    use super::*;
    use crate::devices::testing::with_memory;

    /// Homes of which none has a process.
    fn empty(count: usize) -> Vec<SpaceProcess> {
        let shared = Common::new(Shared::new()).unwrap().share();
        let pages = Vec::leak((0..16).map(|_| AtomicU32::new(0)).collect());
        let processes: Vec<SpaceProcess> =
            (0..=count).map(|number| SpaceProcess { number, count, shared, pages }).collect();
        processes[0].turn(|turn| turn.tags = Tags::new(count));
        processes
    }

    #[test]
    fn who_comes_back_is_told_all_that_has_happened_or_that_it_was_too_much() {
        let processes = empty(3);
        processes[1].tell(Event::KernelPageDropped(0x1000));
        assert_eq!(processes[2].take_events(), Some(vec![Event::KernelPageDropped(0x1000)]));
        processes[2].tell(Event::Copied(0x2000));
        assert_eq!(processes[2].take_events(), Some(Vec::new()));
        assert_eq!(processes[1].take_events(), Some(vec![Event::Copied(0x2000)]));
        assert_eq!(processes[3].take_events().map(|events| events.len()), Some(2));
        for _ in 0..EVENTS {
            processes[1].tell(Event::KernelDropped);
        }
        assert_eq!(processes[2].take_events().map(|events| events.len()), Some(EVENTS));
        processes[1].tell(Event::Written(0x2000));
        assert_eq!(processes[3].take_events(), None);
        assert_eq!(processes[3].take_events(), Some(Vec::new()));
    }

    #[test]
    #[should_panic(expected = "used twice")]
    fn there_is_one_reference_to_what_goes_with_the_turn() {
        let processes = empty(1);
        processes[0].turn(|_| processes[0].counters());
    }

    #[test]
    fn pages_have_writers_and_copies() {
        let processes = empty(3);
        processes[1].set_writer(0x2000..0x4000, true);
        processes[2].tell(Event::Copied(0x3000));
        assert!(processes[2].has_other_writer(0x2000) && processes[2].has_other_writer(0x3000));
        assert!(!processes[1].has_other_writer(0x3000) && !processes[2].has_other_writer(0x4000));
        // Memory that the guest has not got is not known to be safe.
        assert!(processes[1].has_other_writer(0x10_0000));
        processes[1].set_writer(0x2000..0x3000, false);
        assert!(!processes[2].has_other_writer(0x2000) && processes[2].has_other_writer(0x3000));
        assert_eq!(processes[1].copied().collect::<Vec<_>>(), [0x3000]);
        let _ = processes[2].take_events();
        let _ = processes[1].take_events();
        processes[1].tell(Event::Written(0x3000));
        assert_eq!(processes[1].copied().count(), 0);
    }

    #[test]
    fn an_address_space_keeps_its_home_and_the_oldest_is_taken_over() {
        let processes = empty(2);
        let load = |cr3| {
            processes[0].load(cr3, false);
            processes[0].turn(|turn| turn.space)
        };
        let (first, second) = (load(0x1001), load(0x2002));
        assert!(first != second && first > 0 && second > 0);
        assert!(processes[first].take_stale() && !processes[first].take_stale());
        assert_eq!(load(0x1001), first);
        assert!(!processes[first].is_left());
        // What the third finds is another's.
        assert_eq!(load(0x3003), second);
        assert!(processes[first].is_left() && processes[second].is_left() && processes[second].take_stale());
        processes[second].ask(Request::Service);
        processes[second].ask(Request::End(End::Reset));
        assert!(matches!(processes[0].take_request(), Some(Request::Service)));
    }

    /// Each process in its turn counts, and wants another address space, until there were enough.
    #[test]
    #[cfg_attr(miri, ignore = "Miri has one process")]
    fn one_process_after_the_other_has_the_turn() {
        const TURNS: u64 = 500;
        assert!(with_memory(|memory| SpaceProcess::multiply(memory, 0).unwrap().is_none()));
        let counts = Common::new([AtomicU64::new(0), AtomicU64::new(0)]).unwrap().share();
        let first = with_memory(|memory| SpaceProcess::multiply(memory, u64::MAX).unwrap().unwrap());
        if !first.is_first() {
            first.is_ready();
            first.await_turn().unwrap();
            loop {
                let [turns, inside] = counts;
                assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0);
                let turn = turns.fetch_add(1, Ordering::SeqCst);
                match turn < TURNS {
                    true => first.load(0x1000 * (turn * 7 % 50 + 1), false),
                    false => first.ask(Request::Service),
                }
                inside.fetch_sub(1, Ordering::SeqCst);
                if first.next() != first.number {
                    first.hand_over().unwrap();
                }
            }
        }
        first.await_others().unwrap();
        first.load(0x1000, true);
        first.hand_over().unwrap();
        assert!(matches!(first.take_request(), Some(Request::Service)));
        assert_eq!(counts[0].load(Ordering::SeqCst), TURNS + 1);
        let counters = first.counters();
        assert!(
            counters.moves > TURNS / 2 && counters.requests == 1 && counters.taken_over > 50,
            "{counters:?}"
        );
        first.processes()[1..].iter().for_each(|process| end_child(process.cast_signed()));
        signal::forget_children();
    }
}
