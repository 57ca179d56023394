//! Address-space processes: a process of the host for each address space of the guest, with kernel,
//! programs and monitor in it.
//!
//! A process has one address space. If the address spaces of a guest shared one process, each
//! change would drop the mappings of programs, and faults would restore them. Here an address space
//! keeps its mappings in a process of its own, and a write of CR3 changes the process. The first process
//! has the devices and never runs the guest. The others are copies of a process that does nothing else than
//! to make them, the *nursery*: a copy of the first one from before it had threads and gave up system calls.
//! A process is made when an address space needs it.
//!
//! One of these processes has the turn; the others wait. The state of the guest's processor is in
//! shared memory: the block, with the guest's registers, and [`Vcpu`](crate::vcpu::Vcpu). Each
//! process has its own monitor, which knows its mappings. A process gives up system calls before its first
//! turn. A process asks the first one for devices, time and the terminal ([`Request`]). Changes of the
//! kernel's own addresses, and of pages with patched copies, are recorded for the others ([`Event`]). They
//! repeat the changes before they run the guest.
//!
//! The guest's kernel is shown process-context identifiers, by which it says what a processor may
//! keep. [`Tags`] decides when the mappings of a process must be compared with the page tables.

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
        self, Common, Fork, Sibling, map_common,
        tags::{Found, Tags},
    },
    sandbox::Filters,
    signal, smp,
};

/// The largest number of address-space processes. More address spaces take turns. Each process has
/// a bit for each page.
const MOST: usize = 31;
/// The number of pages whose bits are in a word.
const PER_WORD: usize = u32::BITS as usize;
/// The number of events that are remembered. A process that has missed more begins anew.
const EVENTS: usize = 256;
/// The longest reason, in bytes.
const REASON: usize = 1024;

/// What a waiting process is told, in its gate: that it has the turn, or that it follows a fork.
const TURN: u32 = 1;
const FOLLOW: u32 = 2;
/// The number that stands for no process, where the nursery is told which one is wanted.
const NOTHING: u32 = u32::MAX;

/// A request to the first process.
#[derive(Clone, Copy, Debug)]
pub enum Request {
    /// Poll the devices, and deliver an interrupt if the guest takes it.
    Service,
    /// Emulate this instruction. The guest's instruction pointer already points after it.
    Emulate(Instruction),
    /// Emulate the guest's access to a device's register at this physical address.
    Access(u64),
    /// End the machine. The reason is in the turn.
    End(End),
}

/// An event that the other processes must repeat before they run the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// The translation of one of the kernel's addresses was dropped.
    KernelPageDropped(u64),
    /// All translations of the kernel's addresses were dropped.
    KernelDropped,
    /// A page has a patched copy, so writes of the kernel to it must fault.
    Copied(u64),
    /// A page with a patched copy may have been written to.
    Written(u64),
}

/// The state that belongs to the turn.
#[derive(Debug)]
struct Turn {
    request: Option<Request>,
    /// The number of the process of the guest's address space.
    space: usize,
    tags: Tags,
    events: [Event; EVENTS],
    /// The number of events so far.
    happened: u64,
    /// The number of events that each process has taken.
    taken: [u64; MOST + 1],
    /// The guest's instruction pointer, and the one that the guest is to see.
    seen: (u64, u64),
    reason: [u8; REASON],
    reason_length: usize,
    /// The host's processor on which all processes are to run.
    processor: Option<usize>,
    /// The host's processor to which each process has bound itself.
    bound: [Option<usize>; MOST + 1],
    /// The time at which the first process was last bound to none, by the host's clock.
    unbound_ns: u64,
    counters: Counters,
}

/// Events that are counted.
#[derive(Clone, Copy, Debug, Default)]
pub struct Counters {
    /// Changes from one address-space process to another.
    pub moves: u64,
    /// Requests to the first process.
    pub requests: u64,
    /// Address spaces that got the process of another one.
    pub taken_over: u64,
    /// Comparisons with the page tables.
    pub compared: u64,
    /// Processes that were bound to another processor of the host.
    pub bound: u64,
    /// Address-space processes that were made.
    pub made: u64,
    /// Address-space processes that the host has refused.
    pub refused: u64,
}

#[repr(C, align(64))]
#[derive(Debug)]
struct Gate {
    /// 1 if the process has been given the turn.
    is_open: AtomicU32,
    /// The process's number, or 0 if there is none yet.
    process: AtomicI32,
    /// The first process's descriptor of the process (pidfd), by which it sends signals.
    descriptor: AtomicI32,
    /// What the nursery has done: nothing yet, [`MADE`] or [`REFUSED`].
    answer: AtomicU32,
    /// 1 if the process is prepared for its first turn.
    ready: AtomicU32,
}

/// The answers of the nursery.
const MADE: u32 = 1;
const REFUSED: u32 = 2;

/// The memory that all processes share.
#[derive(Debug)]
struct Shared {
    /// The gates of the first process and then of the address-space processes.
    gates: [Gate; MOST + 1],
    /// The number of the process that has the turn.
    active: AtomicU32,
    /// The number of the process that the nursery is to make, or 0.
    wanted: AtomicU32,
    /// The number of the last process that was made. They are made in their order.
    made: AtomicU32,
    /// The host's processors, if there are several to choose from.
    processors: Option<libc::cpu_set_t>,
    turn: UnsafeCell<Turn>,
    /// True while there is a reference to the turn.
    is_turn_used: AtomicBool,
}

// SAFETY: Gates are atomic, and only the process that has the turn uses its state.
unsafe impl Sync for Shared {}

impl Shared {
    fn new() -> Self {
        let zero = || AtomicU32::new(0);
        let [process, descriptor] = [0, -1];
        let gate = || Gate {
            is_open: zero(),
            process: AtomicI32::new(process),
            descriptor: AtomicI32::new(descriptor),
            answer: zero(),
            ready: zero(),
        };
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
            processor: None,
            bound: [None; MOST + 1],
            unbound_ns: 0,
            counters: Counters::default(),
        };
        Self {
            gates: std::array::from_fn(|_| gate()),
            active: AtomicU32::new(0),
            wanted: zero(),
            made: zero(),
            processors: processors(),
            turn: UnsafeCell::new(turn),
            is_turn_used: AtomicBool::new(false),
        }
    }
}

/// A process's way to the others. The first process has the number 0, address-space processes have
/// the numbers from 1 on.
#[derive(Clone, Copy, Debug)]
pub struct SpaceProcess {
    number: usize,
    count: usize,
    shared: &'static Shared,
    /// The address-space processes that have a page mapped writable, by page of the guest's memory.
    pages: &'static [AtomicU32],
    /// A bit for each page: the page may have patched copies.
    copied: &'static [AtomicU32],
}

/// A process of the machine after the start of the nursery.
#[derive(Clone, Copy, Debug)]
pub enum Started {
    /// The first process, which has others for address spaces.
    First(SpaceProcess),
    /// A process that the nursery has made.
    New(SpaceProcess),
    /// The first process. The host allows no others.
    Alone,
}

impl SpaceProcess {
    /// Starts the nursery as a copy of this process, which must have one thread, and has it make a first
    /// process. Returns in this process, and again in each process that the nursery makes. At most `most`
    /// processes are made. The filters are the nursery's, and so those of all that it makes.
    ///
    /// # Errors
    /// If the host refuses memory, or ends the nursery.
    pub fn start(memory: &Memory, most: u64, filters: &Filters) -> Result<Started> {
        let most = MOST.min(usize::try_from(most).unwrap_or(MOST));
        if most == 0 {
            return Ok(Started::Alone);
        }
        let first = Self { count: most, ..Self::first(memory)? };
        match process::fork_with_files() {
            Fork::Child => Ok(Started::New(first.nurse(memory, filters).unwrap_or_else(|error| {
                eprintln!("mercury hosted: {error}");
                // SAFETY: It ends the process, without the destructors: those of files would close the first
                // process's.
                unsafe { libc::_exit(1) }
            }))),
            Fork::Refused => Ok(Started::Alone),
            Fork::Parent(nursery) => {
                signal::watch_child(nursery);
                first.turn(|turn| turn.tags = Tags::new(most));
                if first.make(1) {
                    return Ok(Started::First(first));
                }
                if first.is_one_gone() {
                    return Err(Error::host(signal::how_child_has_ended()));
                }
                signal::forget_children();
                end_child(nursery);
                Ok(Started::Alone)
            }
        }
    }

    /// Makes the memory that all processes share. What it needs of the stack is no longer in use when the
    /// nursery begins, of whose stack each process has a copy.
    #[inline(never)]
    fn first(memory: &Memory) -> Result<Self> {
        let shared = Common::new(Shared::new())?.share();
        let count = (memory.size() / PAGE) as usize;
        let pages = common_words(count)?;
        let copied = common_words(count.div_ceil(PER_WORD))?;
        // SAFETY: It takes nothing.
        let own = unsafe { libc::getpid() };
        shared.gates[0].process.store(own, Ordering::Release);
        Ok(Self { number: 0, count: 0, shared, pages, copied })
    }

    /// Makes processes as they are wanted. Returns in each of them, and never in the nursery.
    fn nurse(self, memory: &Memory, filters: &Filters) -> Result<Self> {
        let parent = self.shared.gates[0].process.load(Ordering::Acquire);
        process::begin(parent, c"mercury-nursery")?;
        filters.apply()?;
        loop {
            let number = self.shared.wanted.swap(0, Ordering::AcqRel) as usize;
            memory.follow()?;
            if number == 0 {
                process::wait_for_long(&self.shared.wanted, 0);
                continue;
            }
            let Some(gate) = self.shared.gates[1..].get(number - 1) else { continue };
            let answer = match process::fork_sibling() {
                Sibling::Child => {
                    process::begin(parent, c"mercury-space")?;
                    return Ok(Self { number, ..self });
                }
                Sibling::Made { process, descriptor } => {
                    gate.descriptor.store(descriptor, Ordering::Release);
                    gate.process.store(process, Ordering::Release);
                    self.shared.made.store(number as u32, Ordering::Release);
                    MADE
                }
                Sibling::Refused => REFUSED,
            };
            gate.answer.store(answer, Ordering::Release);
            process::wake(&gate.answer);
        }
    }

    /// Has the nursery make a process, unless there is one. Returns false if the host refuses it.
    fn make(&self, number: usize) -> bool {
        let answer = &self.shared.gates[number].answer;
        if answer.load(Ordering::Acquire) == MADE {
            return true;
        }
        answer.store(0, Ordering::Release);
        self.shared.wanted.store(number as u32, Ordering::Release);
        process::wake(&self.shared.wanted);
        loop {
            match answer.load(Ordering::Acquire) {
                0 => process::wait(answer, 0),
                answer => {
                    let is_made = answer == MADE;
                    self.turn(|turn| match is_made {
                        true => turn.counters.made += 1,
                        false => turn.counters.refused += 1,
                    });
                    return is_made;
                }
            }
            // Without a nursery there is no answer. The first process finds out, and ends the machine.
            if self.is_first() && self.is_one_gone() {
                return false;
            }
        }
    }

    /// Returns true in the first process if another one has ended. It watches the new ones from here on.
    fn is_one_gone(&self) -> bool {
        /// The number of the last process that this one watches.
        static WATCHED: AtomicU32 = AtomicU32::new(0);
        let made = self.shared.made.load(Ordering::Acquire);
        let watched = WATCHED.swap(made, Ordering::Relaxed);
        if made == watched {
            return signal::is_child_gone();
        }
        let new = self.shared.gates.get(watched as usize + 1..=made as usize).unwrap_or(&[]);
        new.iter().for_each(|gate| signal::watch_child(gate.process.load(Ordering::Acquire)));
        // One may have ended before it was watched.
        signal::is_child_gone() || signal::has_child_ended()
    }

    /// Announces that this process is prepared.
    pub fn is_ready(&self) {
        let gate = self.own();
        gate.ready.store(1, Ordering::Release);
        process::wake(&gate.ready);
    }

    /// Waits until the address-space processes that were made are prepared.
    ///
    /// # Errors
    /// If a process has ended before.
    pub fn await_others(&self) -> Result<()> {
        let made = self.shared.made.load(Ordering::Acquire) as usize;
        let is_ready = |gate: &Gate| process::await_ready(&gate.ready, &gate.process);
        match self.shared.gates.get(1..=made).unwrap_or(&[]).iter().all(is_ready) {
            true => Ok(()),
            false => Err(Error::host("a process for an address space could not be started")),
        }
    }

    /// Returns true if fewer address-space processes are allowed than there can be.
    #[must_use]
    pub fn are_few(&self) -> bool {
        self.count < MOST
    }

    /// Returns the largest number of address-space processes.
    #[must_use]
    pub fn count(&self) -> usize {
        self.count
    }

    /// Returns true for the first process, which has the devices and does not run the guest.
    #[must_use]
    pub fn is_first(&self) -> bool {
        self.number == 0
    }

    fn own(&self) -> &'static Gate {
        &self.shared.gates[self.number]
    }

    /// Uses the state of the turn. `what` must not call this function.
    fn turn<R>(&self, what: impl FnOnce(&mut Turn) -> R) -> R {
        let is_used = &self.shared.is_turn_used;
        assert!(!is_used.load(Ordering::Relaxed), "the turn is used twice: this is a bug");
        is_used.store(true, Ordering::Relaxed);
        // SAFETY: Only the process that has the turn calls this function, in its one thread that
        // runs the monitor. The flag forbids a second reference there. The process hands the turn
        // over by a gate, which orders the writes of all processes.
        let result = what(unsafe { &mut *self.shared.turn.get() });
        is_used.store(false, Ordering::Relaxed);
        result
    }

    /// Returns the counters.
    #[must_use]
    pub fn counters(&self) -> Counters {
        self.turn(|turn| turn.counters)
    }

    /// Asks the first process for something before the guest goes on. An earlier request is kept,
    /// because the first process also polls the devices then.
    pub fn ask(&self, request: Request) {
        self.turn(|turn| {
            turn.request.get_or_insert(request);
        });
    }

    /// Takes the request to the first process.
    #[must_use]
    pub fn take_request(&self) -> Option<Request> {
        self.turn(|turn| turn.request.take())
    }

    /// Returns true if the guest cannot go on here at once: another process is next, or mappings
    /// must be compared first.
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

    /// Stores the guest's instruction pointer, and the one that the guest is to see, for a request
    /// to the first process.
    pub fn show(&self, rip: u64, visible: u64) {
        self.turn(|turn| turn.seen = (rip, visible));
    }

    /// Returns the instruction pointer that the guest is to see.
    #[must_use]
    pub fn visible(&self, rip: u64) -> u64 {
        let (shown, visible) = self.turn(|turn| turn.seen);
        if shown == rip { visible } else { rip }
    }

    /// Asks the first process to end the machine, in place of any earlier request, and gives the
    /// reason.
    pub fn demand_end(&self, how: End, why: &str) {
        let length = why.floor_char_boundary(REASON);
        self.turn(|turn| {
            turn.request = Some(Request::End(how));
            turn.reason[..length].copy_from_slice(&why.as_bytes()[..length]);
            turn.reason_length = length;
        });
    }

    /// Returns the reason for the machine's end.
    #[must_use]
    pub fn reason(&self) -> String {
        self.turn(|turn| String::from_utf8_lossy(&turn.reason[..turn.reason_length.min(REASON)]).into_owned())
    }

    /// Hands the turn to the next process, and waits until it comes back. Meanwhile `follow` is called after
    /// each fork of the machine. Returns nothing if a process has ended.
    #[must_use]
    pub fn hand_over(&self, follow: impl FnMut()) -> Option<()> {
        let to = self.next();
        self.turn(|turn| match to == 0 || self.number == 0 {
            true => turn.counters.requests += u64::from(to == 0),
            false => turn.counters.moves += 1,
        });
        let gate = &self.shared.gates[to];
        self.shared.active.store(to as u32, Ordering::SeqCst);
        gate.is_open.fetch_or(TURN, Ordering::Release);
        process::wake(&gate.is_open);
        self.await_turn(follow)
    }

    /// Has the nursery and all address-space processes follow a fork of the machine. The first process calls
    /// this function in its turn.
    pub fn have_all_follow(&self) {
        let made = self.shared.made.load(Ordering::Acquire) as usize;
        for gate in self.shared.gates.get(1..=made).unwrap_or(&[]) {
            gate.is_open.fetch_or(FOLLOW, Ordering::Release);
            process::wake(&gate.is_open);
        }
        self.shared.wanted.store(NOTHING, Ordering::Release);
        process::wake(&self.shared.wanted);
    }

    /// Binds this process, which has the turn, to the host's processor on which the others run. On another
    /// processor, which sleeps, the next process would start late. From time to time the first process is
    /// bound to none, so that the host chooses where all of them are.
    fn settle(&self) {
        let Some(all) = &self.shared.processors else { return };
        let set = self.turn(|turn| {
            if IS_UNBOUND.load(Ordering::Relaxed) {
                IS_UNBOUND.store(false, Ordering::Relaxed);
                turn.bound[self.number] = None;
            }
            self.choose_processors(turn, all)
        });
        if let Some(set) = set {
            bind(&set);
        }
    }

    /// Lets the host choose a processor until this process has the turn.
    fn unbind(&self) {
        if let Some(all) = &self.shared.processors {
            bind(all);
            IS_UNBOUND.store(true, Ordering::Relaxed);
        }
    }

    /// Returns the host's processors to which this process must bind itself, unless it is bound to them.
    fn choose_processors(&self, turn: &mut Turn, all: &libc::cpu_set_t) -> Option<libc::cpu_set_t> {
        const CHOICE_NS: u64 = 100_000_000;
        if self.is_first() && now().saturating_sub(turn.unbound_ns) > CHOICE_NS {
            (turn.unbound_ns, turn.bound[0], turn.processor) = (now(), None, None);
            return Some(*all);
        }
        let Some(processor) = turn.processor else {
            // The host has chosen. The first process decides for all.
            // SAFETY: It takes nothing.
            let here = usize::try_from(unsafe { libc::sched_getcpu() }).ok();
            let here = here.filter(|here| self.is_first() && *here < libc::CPU_SETSIZE as usize)?;
            turn.processor = Some(here);
            return self.choose_processors(turn, all);
        };
        if turn.bound[self.number] == Some(processor) {
            return None;
        }
        (turn.bound[self.number], turn.counters.bound) = (Some(processor), turn.counters.bound + 1);
        // SAFETY: All zeros are a valid set, and the number is below its size.
        let only = unsafe {
            let mut set: libc::cpu_set_t = std::mem::zeroed();
            libc::CPU_SET(processor, &mut set);
            set
        };
        Some(only)
    }

    /// Waits for the turn. Meanwhile `follow` is called after each fork of the machine. Returns nothing if a
    /// process has ended. Only the first process looks for that: the others end with it.
    #[must_use]
    pub fn await_turn(&self, mut follow: impl FnMut()) -> Option<()> {
        let own = &self.own().is_open;
        loop {
            let why = own.swap(0, Ordering::Acquire);
            if why & FOLLOW != 0 {
                // The guest goes on meanwhile, on the processor to which this process is bound.
                self.unbind();
                follow();
            }
            if why & TURN != 0 {
                break;
            }
            if why != 0 {
                continue;
            }
            if !self.is_first() {
                process::wait_for_long(own, 0);
                continue;
            }
            if self.is_one_gone() {
                return None;
            }
            process::wait_for(own, 0, PATIENCE_NS);
        }
        self.settle();
        Some(())
    }

    /// Loads CR3. Translations are kept unless `flush` is set. An address space without a process gets a new
    /// one, or that of another one if the host allows no more.
    pub fn load(&self, cr3: u64, flush: bool) {
        loop {
            let number = self.turn(|turn| {
                turn.tags.load(cr3, flush);
                let index = match turn.tags.choose(cr3) {
                    Found::Own(index) => index,
                    Found::Other(index) => {
                        turn.counters.taken_over += 1;
                        turn.tags.make_stale(index);
                        index
                    }
                };
                turn.space = 1 + index;
                turn.space
            });
            if self.make(number) || number == 1 {
                return;
            }
            // The ones before it were made before.
            self.turn(|turn| turn.tags.limit(number - 1));
        }
    }

    /// Drops all translations of programs.
    pub fn flush_all(&self) {
        self.turn(|turn| turn.tags.flush_all());
    }

    /// Returns true if the mappings of this process must be compared with the page tables. The
    /// caller then compares them.
    #[must_use]
    pub fn take_stale(&self) -> bool {
        self.turn(|turn| {
            let is_stale = turn.tags.take_stale(self.number - 1);
            turn.counters.compared += u64::from(is_stale);
            is_stale
        })
    }

    /// Records an event for the other processes.
    pub fn tell(&self, event: Event) {
        self.turn(|turn| {
            debug_assert!(turn.taken[self.number] == turn.happened);
            turn.events[turn.happened as usize % EVENTS] = event;
            turn.happened += 1;
            turn.taken[self.number] = turn.happened;
        });
        match event {
            Event::Copied(physical) => self.set_copied(physical, true),
            Event::Written(physical) => self.set_copied(physical, false),
            _ => {}
        }
    }

    /// Records if a page may have patched copies.
    fn set_copied(&self, physical: u64, is_copied: bool) {
        let page = (physical / PAGE) as usize;
        let Some(word) = self.copied.get(page / PER_WORD) else { return };
        let bit = 1 << (page % PER_WORD);
        match is_copied {
            true => word.fetch_or(bit, Ordering::Relaxed),
            false => word.fetch_and(!bit, Ordering::Relaxed),
        };
    }

    /// Returns the events since this process had the turn. Returns nothing if some of them are not
    /// remembered.
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

    /// Records if this process has a range of physical addresses mapped writable.
    pub fn set_writer(&self, physical: std::ops::Range<u64>, is_one: bool) {
        let (from, to) = ((physical.start / PAGE) as usize, physical.end.div_ceil(PAGE) as usize);
        for page in self.pages.get(from..to.min(self.pages.len())).unwrap_or(&[]) {
            match is_one {
                true => page.fetch_or(self.bit(), Ordering::Relaxed),
                false => page.fetch_and(!self.bit(), Ordering::Relaxed),
            };
        }
    }

    /// Returns true if another process has a page mapped writable.
    #[must_use]
    pub fn has_other_writer(&self, physical: u64) -> bool {
        let page = self.pages.get((physical / PAGE) as usize);
        page.is_none_or(|page| page.load(Ordering::Relaxed) & !self.bit() != 0)
    }

    /// Returns the physical addresses of pages that may have patched copies.
    pub fn copied(&self) -> impl Iterator<Item = u64> {
        let words = self.copied.iter().enumerate().map(|(at, word)| (at, word.load(Ordering::Relaxed)));
        words.filter(|(_, word)| *word != 0).flat_map(|(at, word)| {
            let set = (0..PER_WORD).filter(move |bit| word & (1 << bit) != 0);
            set.map(move |bit| (at * PER_WORD + bit) as u64 * PAGE)
        })
    }

    /// Interrupts the address-space process that has the turn. A signal handler in the first
    /// process calls this function.
    pub fn interrupt(&self, is_urgent: bool) {
        let active = self.shared.active.load(Ordering::SeqCst) as usize;
        if self.number != 0 || active == 0 {
            return;
        }
        let process = self.shared.gates[active].descriptor.load(Ordering::Acquire);
        let signal = if is_urgent { smp::CALL } else { libc::SIGUSR1 };
        let none = ptr::null::<libc::siginfo_t>();
        // SAFETY: All calls take numbers, or nothing. The interrupted code may be about to read the error's
        // number, so it is restored.
        unsafe {
            let error = *libc::__errno_location();
            libc::syscall(libc::SYS_pidfd_send_signal, process, signal, none, 0);
            *libc::__errno_location() = error;
        }
    }
}

/// True if this process is bound to none of the host's processors, whatever the turn's state says.
static IS_UNBOUND: AtomicBool = AtomicBool::new(false);

/// Binds this process to the host's processors of a set.
fn bind(set: &libc::cpu_set_t) {
    // A failure leaves the choice to the host.
    // SAFETY: The set is one, and outlives the call.
    unsafe { libc::sched_setaffinity(0, size_of_val(set), ptr::from_ref(set)) };
}

/// Maps so many words that all processes share, which are zero.
fn common_words(count: usize) -> Result<&'static [AtomicU32]> {
    let words = map_common(count * size_of::<AtomicU32>())?;
    // SAFETY: The memory stays, is as long, and zero, which is a valid value; all of it is atomic.
    Ok(unsafe { std::slice::from_raw_parts(words.cast::<AtomicU32>(), count) })
}

/// Returns the host's processors for this process, if there are several.
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

/// The time between two checks for processes that have ended, in nanoseconds.
const PATIENCE_NS: i64 = 100_000_000;

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::sync::atomic::AtomicU64;

    use super::*;
    use crate::{run::Isolation, sandbox::Special, testing::with_memory};

    /// Makes address-space processes without a process of the host.
    fn empty(count: usize) -> Vec<SpaceProcess> {
        let shared = Common::new(Shared::new()).unwrap().share();
        let words = |count| &*Vec::leak((0..count).map(|_| AtomicU32::new(0)).collect());
        let (pages, copied) = (words(16), words(1));
        let processes: Vec<SpaceProcess> =
            (0..=count).map(|number| SpaceProcess { number, count, shared, pages, copied }).collect();
        shared.gates.iter().for_each(|gate| gate.answer.store(MADE, Ordering::Release));
        processes[0].turn(|turn| turn.tags = Tags::new(count));
        processes
    }

    #[test]
    fn a_returning_process_gets_all_events_or_an_overflow() {
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
        // Memory outside the guest's is not known to be safe.
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
        // The third address space gets the process of another one.
        assert_eq!(load(0x3003), second);
        assert!(processes[first].is_left() && processes[second].is_left() && processes[second].take_stale());
        processes[second].ask(Request::Service);
        processes[second].ask(Request::End(End::Reset));
        assert!(matches!(processes[0].take_request(), Some(Request::Service)));
    }

    /// Lets each process count in its turn and ask for another address space, until there were
    /// enough turns.
    #[test]
    #[cfg_attr(miri, ignore = "Miri has one process")]
    fn one_process_after_the_other_has_the_turn() {
        const TURNS: u64 = 500;
        let special = Special { binds_itself: true, makes: Some(process::SIBLING), ..Special::default() };
        let filters = Filters::new(Isolation::None, &special).unwrap();
        let none = with_memory(|memory| SpaceProcess::start(memory, 0, &filters).unwrap());
        assert!(matches!(none, Started::Alone));
        let counts = Common::new([AtomicU64::new(0), AtomicU64::new(0)]).unwrap().share();
        let started = with_memory(|memory| SpaceProcess::start(memory, u64::MAX, &filters).unwrap());
        let (Started::First(first) | Started::New(first)) = started else { panic!("the host refuses") };
        if !first.is_first() {
            first.is_ready();
            first.await_turn(|| ()).unwrap();
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
                    first.hand_over(|| ()).unwrap();
                }
            }
        }
        first.await_others().unwrap();
        first.load(0x1000, true);
        first.hand_over(|| ()).unwrap();
        assert!(matches!(first.take_request(), Some(Request::Service)));
        assert_eq!(counts[0].load(Ordering::SeqCst), TURNS + 1);
        let counters = first.counters();
        assert!(
            counters.moves > TURNS / 2 && counters.requests == 1 && counters.taken_over > 50,
            "{counters:?}"
        );
        assert_eq!((counters.made, counters.refused), (MOST as u64, 0));
        let gates = first.shared.gates[1..].iter();
        gates.for_each(|gate| end_child(gate.process.load(Ordering::Acquire)));
        signal::forget_children();
    }
}
