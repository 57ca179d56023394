//! Starts a machine: everything that can be wrong is found before the guest runs.

use std::{
    arch::x86_64::_rdtsc,
    convert::Infallible,
    ffi::{CString, c_void},
    ops::Range,
    path::PathBuf,
    ptr, slice,
    sync::{Arc, OnceLock},
    thread,
    time::Duration,
};

use mercury_devices::Agent;
pub use mercury_devices::Identity;
use mercury_hosted_options::{gdb::GdbOption, region::RegionOption};

use crate::{
    block,
    boot::{self, Beginning},
    control::{self, Control},
    cpuid,
    devices::{
        Block, Console, Devices, JoinedSubnet, Log, NetOption, OpenUplink, Slots, SubnetOption, now,
        signal_waker,
    },
    entry,
    error::{Error, Result},
    fork::Link,
    gdb::{self, Debugger, KernelCode, Opened},
    heap,
    isolation::ProgramProcesses,
    layout::{PAGE, THUNKS, THUNKS_SIZE},
    limits::{self, Limits},
    load::Loaded,
    loader::{self, Facts, Ready},
    machine::{LoadedCode, LocalProcessor, Machine, Resident, Saving, State},
    memory::{Memory, disks::Disks},
    patched::{PatchedCopies, Room},
    process::{
        self, Placement,
        per_space::{SpaceProcess, Started},
    },
    sandbox::{self, Filters, Special},
    saved::{self, Saved},
    signal,
    smp::{self, Processor, bus::Bus},
    thunks,
};

/// The options of a machine.
#[derive(Clone, Debug)]
pub struct Options {
    /// The pre-virtualized `vmlinux`.
    pub kernel: PathBuf,
    /// Its first file system.
    pub initramfs: Option<PathBuf>,
    pub disks: Vec<DiskOption>,
    /// Memory in common with other machines.
    pub regions: Vec<RegionOption>,
    /// The address at which gdb may connect.
    pub gdb: Option<GdbOption>,
    pub net: Option<NetOption>,
    pub subnet: Option<SubnetOption>,
    /// The size of its memory, in bytes.
    pub memory: u64,
    /// More for the command line.
    pub append: String,
    /// The number of processors.
    pub cpus: usize,
    /// The separation of programs.
    pub isolation: Isolation,
    /// Rewrite programs' system calls, if they run in this process.
    pub rewrite: bool,
    /// Say what is strange, and what was counted.
    pub verbose: bool,
    /// A socket by which the machine can be saved.
    pub control: Option<PathBuf>,
    /// A saved machine that goes on here.
    pub restore: Option<PathBuf>,
    /// The identity that a copy of another machine is to have.
    pub identity: Option<Identity>,
}

/// The separation of the guest's programs from its kernel and from the monitor.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Isolation {
    #[default]
    None,
    /// The host: they run in processes of their own.
    Process,
}

/// The use of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DiskAccess {
    /// The guest reads and writes the file.
    Write,
    /// The guest only reads.
    Read,
    /// The image is a part of the guest's memory, which the guest only reads.
    Shared,
    /// The image is a part of the guest's memory. Pages that the guest writes are its own, and gone at the
    /// end.
    Private,
}

impl DiskAccess {
    /// Returns true if the image is a part of the guest's memory.
    #[must_use]
    pub fn is_memory(self) -> bool {
        matches!(self, Self::Shared | Self::Private)
    }
}

/// A disk that is wanted: a file, and after a comma a word for its use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiskOption {
    pub path: PathBuf,
    pub access: DiskAccess,
}

impl From<&str> for DiskOption {
    fn from(text: &str) -> Self {
        let words =
            [(",ro", DiskAccess::Read), (",shared", DiskAccess::Shared), (",private", DiskAccess::Private)];
        let found = words.iter().find_map(|(word, access)| Some((text.strip_suffix(word)?, *access)));
        let (path, access) = found.unwrap_or((text, DiskAccess::Write));
        Self { path: path.into(), access }
    }
}

/// The result of loading a kernel.
#[derive(Clone, Copy, Debug)]
pub struct Report {
    /// Slots that were filled.
    pub filled: usize,
    /// Slots that were left: what is in them traps, or may be executed.
    pub left: usize,
    /// Places where the guest leaves for the monitor.
    pub exits: usize,
    /// Bytes of code for slots.
    pub code_bytes: usize,
    /// Places that were relocated.
    pub relocations: usize,
    /// Numbers in the code that were addresses, and were changed.
    pub constants: usize,
}

impl Report {
    /// Returns the report about a loaded kernel.
    #[must_use]
    pub fn of(loaded: &Loaded) -> Self {
        Self {
            filled: loaded.filled,
            left: loaded.unfilled,
            exits: loaded.exits.len(),
            code_bytes: loaded.thunks.len(),
            relocations: loaded.relocated,
            constants: loaded.constants,
        }
    }
}

/// The command of this program that keeps a subnet.
const KEEP_SUBNET: &str = "keep-subnet";
/// A kernel of this kind does not start with less.
pub const LEAST_MEMORY: u64 = 64 << 20;
const STACK: u64 = 1 << 20;
/// Each piece of own pages splits the direct map and the window twice. So many of the mappings that the host
/// allows are for each piece, with a reserve for programs.
const MAPPINGS_PER_PIECE: u64 = 8;

/// Loads the kernel as for a start, and says what was found.
///
/// # Errors
/// What would be in the way of a start, but for networks, debuggers and processes.
pub fn check(options: &Options) -> Result<Report> {
    check_limits(options, &Limits::default())?;
    open_disks(options)?;
    Ok(loader::load(options, &make_memory(options, u32::MAX)?)?.facts.report)
}

/// Starts the machine. The process ends when the machine does; the function returns only with an error.
///
/// # Errors
/// The first obstacle.
pub fn run(options: &Options) -> Result<Infallible> {
    let most_mapped = begin(options)?;
    sandbox::close_inherited()?;
    let saved = options.restore.as_deref().map(Saved::open).transpose()?;
    let memory = make_memory(options, most_pieces(most_mapped))?;
    // A piece of own pages takes mappings.
    let most_mapped = if memory.layers().is_some() { most_mapped / 2 } else { most_mapped };
    let ready = loader::load(options, &memory)?;
    let restored = saved.map(|saved| fill(saved, &memory)).transpose()?.map(|(state, _)| state);
    // The file may be restored again, or be a copy of a machine that runs: both must not make the same keys.
    if let Some(generator) = ready.facts.generator.filter(|_| restored.is_some()) {
        generator.reseed(&memory)?;
    }
    launch(options, memory, Prepared { ready, restored, most_mapped, clock_khz: clock_khz(), link: None })
}

/// Prepares this process for a machine or a template. Returns the number of mappings that the host allows.
///
/// # Errors
/// If the host does not have what a machine needs.
pub(crate) fn begin(options: &Options) -> Result<u64> {
    without_randomization()?;
    let limits = Limits::default();
    limits.addresses()?;
    let most_mapped = check_limits(options, &limits)?;
    heap::share();
    Ok(most_mapped)
}

/// The parts of a machine that do not depend on its process.
pub(crate) struct Prepared {
    pub ready: Ready,
    /// The state from which the guest goes on. Its memory is there already.
    pub restored: Option<Vec<u8>>,
    /// The number of mappings that the host allows.
    pub most_mapped: u64,
    pub clock_khz: u64,
    /// The way to the template that may fork the machine.
    pub link: Option<Link>,
}

/// Turns this process into a machine, whose memory has its kernel or a saved machine.
///
/// # Errors
/// The first obstacle.
pub(crate) fn launch(options: &Options, memory: Memory, prepared: Prepared) -> Result<Infallible> {
    let Prepared { ready, restored, most_mapped, clock_khz, link } = prepared;
    let Ready { code, places, facts, debugged } = ready;
    let limits = Limits::default();
    let code_hash = *blake3::hash(&code).as_bytes();
    let files = Files::open(options)?;
    place_code(&code)?;
    drop(code);
    give_up_files(options)?;
    process::end_restartable_sequences();
    let _ = constant_parts();
    heap::give_back();
    // Processes are made before there are threads, because they begin as copies of this one.
    let first = (options.cpus > 1).then(|| Processor::first(options.cpus)).transpose()?;
    let processor = first.map(Processor::multiply).transpose()?;
    let isolated = start_program_processes(options, &memory, most_mapped)?;
    prepare_block(match options.isolation {
        Isolation::None => facts.gates.system_return,
        Isolation::Process => facts.gates.leaving,
    })?;
    let state = State::new()?;
    // Threads that listen to devices send signals from their start on.
    signal::install()?;
    memory.disks().check()?;
    let filters = Filters::new(Isolation::None, &Special { binds_itself: true, ..Special::default() })?;
    let placement = match isolated {
        Some(isolated) => Placement::Isolated(Box::new(isolated)),
        None => start_space_processes(options, &memory, &limits)?,
    };
    let local = match (processor, facts.bringup) {
        (Some(one), Some(bringup)) => Some(LocalProcessor::new(one, clock_khz, bringup)?),
        _ => None,
    };
    let start = Start { options, memory, places, facts, most_mapped, state, placement, processor, local };
    match start.role() {
        Role::SpaceProcess(space) => start.run_space_process(space, files, &filters),
        Role::OtherProcessor(one) => start.run_other_processor(one, files),
        Role::First => start.run_first(files, First { debugged, restored, clock_khz, code_hash, link }),
    }
}

/// Puts a saved machine's memory in place of the kernel that was loaded. Returns the rest of its state, and
/// the pages of disks that the machine had changed.
pub(crate) fn fill(saved: Saved, memory: &Memory) -> Result<(Vec<u8>, Vec<Range<u64>>)> {
    memory.erase()?;
    let changed = saved.fill(memory)?;
    Ok((saved.state, changed))
}

/// Returns the number of pieces in which a machine's own pages may be.
pub(crate) fn most_pieces(most_mapped: u64) -> u32 {
    u32::try_from(most_mapped / MAPPINGS_PER_PIECE).unwrap_or(u32::MAX)
}

/// The things that only the first process needs.
struct First {
    debugged: KernelCode,
    /// The state from which the guest goes on.
    restored: Option<Vec<u8>>,
    clock_khz: u64,
    code_hash: [u8; 32],
    link: Option<Link>,
}

/// Checks the host's limits. Returns the number of mappings that the host allows.
fn check_limits(options: &Options, limits: &Limits) -> Result<u64> {
    signal::ignore_file_size();
    let most_mapped = limits.mappings()?;
    limits.memory(options.memory)?;
    check_processors(options)?;
    check_saving(options)?;
    Ok(most_mapped)
}

/// Checks that a machine which is saved or restored has nothing that cannot be.
fn check_saving(options: &Options) -> Result<()> {
    let is_wanted = options.control.is_some() || options.restore.is_some();
    let is_plain = options.cpus == 1 && options.gdb.is_none();
    if is_plain || !is_wanted {
        return Ok(());
    }
    Err(Error::new("only a machine with one processor can be saved and restored, without gdb")
        .hint("leave out --cpus and --gdb, or --control"))
}

/// The files and connections of the machine, opened before the process gives up opening any.
struct Files {
    disks: Vec<Block>,
    gdb: Option<Opened>,
    control: Option<control::Opened>,
    uplink: Option<OpenUplink>,
    subnet: Option<JoinedSubnet>,
}

impl Files {
    fn open(options: &Options) -> Result<Self> {
        Ok(Self {
            disks: open_disks(options)?,
            gdb: options.gdb.as_ref().map(gdb::open).transpose()?,
            control: options.control.as_deref().map(control::open).transpose()?,
            uplink: options.net.as_ref().map(NetOption::open).transpose()?,
            subnet: options.subnet.as_ref().map(join).transpose()?,
        })
    }

    /// Leaves the files to the process that serves the devices: closing them would end what goes on there.
    /// The descriptors of a subnet are closed, because with them all of its rings could be mapped.
    fn leave(self) {
        std::mem::forget((self.disks, self.uplink, self.gdb, self.control));
    }
}

/// Takes a place on a subnet. This program keeps the subnet in another process, if none does.
fn join(subnet: &SubnetOption) -> Result<JoinedSubnet> {
    subnet.join(&[KEEP_SUBNET.into(), subnet.name.to_string().into()])
}

/// Gives up opening files.
fn give_up_files(options: &Options) -> Result<()> {
    if !sandbox::forbid_files()? && options.verbose {
        eprintln!("mercury hosted: the host's kernel has no Landlock");
    }
    Ok(())
}

fn start_program_processes(
    options: &Options,
    memory: &Memory,
    most_mapped: u64,
) -> Result<Option<ProgramProcesses>> {
    let is_wanted = options.isolation == Isolation::Process;
    is_wanted.then(|| ProgramProcesses::start(memory, most_mapped)).transpose()
}

/// Starts what makes a process for each address space, if the options allow it and the host has room.
fn start_space_processes(options: &Options, memory: &Memory, limits: &Limits) -> Result<Placement> {
    // A debugger and several processors know of one process for all address spaces.
    if options.cpus > 1 || options.gdb.is_some() {
        return Ok(Placement::One);
    }
    if options.rewrite {
        thunks::prepare_tables();
    }
    let special = Special { makes: Some(process::SIBLING), binds_itself: true, ..Special::default() };
    let filters = Filters::new(Isolation::None, &special)?;
    heap::give_back();
    Ok(match SpaceProcess::start(memory, limits.space_processes(options.memory), &filters)? {
        Started::First(space) | Started::New(space) => Placement::PerSpace(space),
        Started::Alone => Placement::One,
    })
}

fn open_disks(options: &Options) -> Result<Vec<Block>> {
    let disks = options.disks.iter().filter(|disk| !disk.access.is_memory());
    disks.map(|disk| Block::open(&disk.path, disk.access == DiskAccess::Read)).collect()
}

fn check_processors(options: &Options) -> Result<()> {
    if !(1..=smp::MOST).contains(&options.cpus) {
        return Err(Error::new(format!("a machine has 1 to {} processors, not {}", smp::MOST, options.cpus))
            .hint("choose another number with --cpus"));
    }
    if options.cpus > 1 && options.gdb.is_some() {
        return Err(
            Error::new("gdb works only with machines of one processor").hint("leave out --cpus or --gdb")
        );
    }
    Ok(())
}

/// Checks the host, and makes the guest's memory.
fn make_memory(options: &Options, most_pieces: u32) -> Result<Memory> {
    check_memory(options)?;
    let disks = Disks::open(&options.disks, &options.regions, options.memory)?;
    match disks.is_empty() {
        true => Memory::new(options.memory),
        false => Memory::with_disks(Arc::new(disks), most_pieces),
    }
}

/// Checks the host, and the size of the guest's memory.
pub(crate) fn check_memory(options: &Options) -> Result<()> {
    check_host()?;
    if options.memory < LEAST_MEMORY {
        return Err(Error::new(format!("{} MiB of memory are not enough", options.memory >> 20))
            .hint(format!("give the guest {} MiB or more with --memory", LEAST_MEMORY >> 20)));
    }
    let is_plain = options.cpus == 1 && options.gdb.is_none() && options.isolation == Isolation::None;
    if !is_plain && !options.regions.is_empty() {
        return Err(Error::new("only a machine with one processor has regions, without gdb and isolation")
            .hint("leave out --region, or --cpus, --gdb and --isolation"));
    }
    if !is_plain && options.disks.iter().any(|disk| disk.access.is_memory()) {
        return Err(Error::new(
            "only a machine with one processor has disks in memory, without gdb and isolation",
        )
        .hint("leave out --cpus, --gdb and --isolation, or use `,ro` instead of `,shared` and `,private`"));
    }
    Ok(())
}

/// The part of the machine that a process plays.
enum Role {
    /// It serves the devices, and it is the only or the first process.
    First,
    /// It is a processor other than the first.
    OtherProcessor(Processor),
    /// It shows an address space.
    SpaceProcess(SpaceProcess),
}

/// The parts of the machine that each of its processes has when it starts.
struct Start<'a> {
    options: &'a Options,
    memory: Memory,
    places: LoadedCode,
    facts: Facts,
    most_mapped: u64,
    state: State,
    placement: Placement,
    processor: Option<Processor>,
    /// None if there is one processor.
    local: Option<LocalProcessor>,
}

impl Start<'_> {
    fn role(&self) -> Role {
        match (self.placement.per_space(), self.processor) {
            (Some(space), _) if !space.is_first() => Role::SpaceProcess(space),
            (_, Some(one)) if !one.is_first() => Role::OtherProcessor(one),
            _ => Role::First,
        }
    }

    /// Prepares a new address-space process, which waits for its first turn then.
    fn run_space_process(self, space: SpaceProcess, files: Files, filters: &Filters) -> Result<Infallible> {
        files.leave();
        sandbox::keep_only(self.memory.descriptors())?;
        let room = self.rewrites().then(Room::new).transpose()?;
        signal::dispatch_system_calls()?;
        filters.apply()?;
        space.is_ready();
        forget_the_start();
        let _ = space.await_turn(|| self.follow());
        let machine = self.machine(room, Bus::Absent);
        forget_the_start();
        machine.run()
    }

    /// Maps the machine's pages again after a fork, before this process has had a turn.
    fn follow(&self) {
        if let Err(error) = self.memory.follow() {
            eprintln!("mercury hosted: {error}");
            // The first process notices it, and ends the machine.
            // SAFETY: It ends the process.
            unsafe { libc::_exit(1) }
        }
    }

    fn run_other_processor(self, one: Processor, files: Files) -> Result<Infallible> {
        files.leave();
        self.run(
            Bus::Other(one),
            Parts::default(),
            Special { processors: one.processes(), ..Special::default() },
        )
    }

    fn run_first(self, files: Files, first: First) -> Result<Infallible> {
        let Files { mut disks, gdb, control, uplink, subnet } = files;
        let space = self.placement.per_space();
        if let Some(space) = space.filter(|space| space.are_few() && self.options.verbose) {
            eprintln!(
                "mercury hosted: the host has memory for {} processes of address spaces",
                space.count()
            );
        }
        self.overlap_requests(&mut disks);
        let debugger = gdb.map(|gdb| Debugger::new(gdb, first.debugged)).transpose()?;
        let control = control.map(|control| Control::new(control, signal_waker())).transpose()?;
        let listener = debugger.as_ref().map(Debugger::descriptor);
        let log = Log::of_output();
        let special = Special {
            log: log.is_some(),
            rings: disks.iter().filter_map(Block::ring).collect(),
            listener: listener.or_else(|| control.as_ref().map(Control::descriptor)),
            link: first.link.as_ref().map(Link::socket),
            processors: self.processor.map_or_else(Vec::new, |one| one.processes()),
            signals: space.is_some(),
            binds_itself: space.is_some(),
            ..Special::default()
        };
        let net = uplink.map(|uplink| uplink.start(signal_waker())).transpose()?;
        let subnet = subnet.map(|subnet| subnet.start(signal_waker())).transpose()?;
        let words = first.link.as_ref().map(Link::words).transpose()?;
        let words = words.unwrap_or_else(|| Box::leak(Box::default()));
        let agent = Agent::new(self.options.identity.clone());
        let slots = Slots::new(disks, self.memory.disks().devices(), net, subnet, &words.balloon, agent)?;
        if first.restored.is_none() {
            self.describe(&slots, first.clock_khz)?;
        }
        let devices = Devices::new(Console::open(log)?, &self.memory, slots)?;
        let facts = saved::Facts {
            memory: self.options.memory,
            isolation: self.options.isolation,
            per_space: space.is_some(),
            code: first.code_hash,
            clock_khz: first.clock_khz,
        };
        let parts = Parts {
            debugger,
            saving: Some(Saving { control, link: first.link, words, facts }),
            restored: first.restored,
        };
        self.run(Bus::Own(Box::new(devices)), parts, special)
    }

    /// Has the host serve several requests of a disk at once, if it can.
    fn overlap_requests(&self, disks: &mut [Block]) {
        for disk in disks {
            if let Err(error) = disk.overlap(signal_waker())
                && self.options.verbose
            {
                eprintln!(
                    "mercury hosted: no io_uring ({error}): the machine serves a disk's requests one by one"
                );
            }
        }
    }

    /// Writes the boot parameters into the guest's memory.
    fn describe(&self, slots: &Slots, clock_khz: u64) -> Result<()> {
        let Options { append, cpus, .. } = &self.options;
        let line = boot::command_line(&slots.describe(&self.memory), append, clock_khz, *cpus);
        boot::describe(&self.memory, &line)?;
        if self.options.cpus > 1 {
            boot::describe_processors(&self.memory, self.options.cpus)?;
        }
        Ok(())
    }

    /// Returns true if this process rewrites programs' system calls.
    fn rewrites(&self) -> bool {
        self.options.rewrite
            && self.options.isolation == Isolation::None
            && self.processor.is_none()
            && self.placement.runs_guest()
    }

    fn run(self, devices: Bus, parts: Parts, special: Special) -> Result<Infallible> {
        let special = Special { own: Some(std::process::id()), ..special };
        let room = self.rewrites().then(Room::new).transpose()?;
        let (beginning, isolation) = (self.facts.beginning, self.options.isolation);
        let mut machine = self.machine(room, devices).with_debugger(parts.debugger).with_saving(parts.saving);
        let restored = parts.restored.as_deref();
        let prepared = prepare_processor(&mut machine, beginning, restored, isolation, &special);
        prepared.inspect_err(|_| machine.restore_terminal())?;
        forget_the_start();
        machine.run()
    }

    /// Puts the machine together. Patched copies need room.
    fn machine(self, room: Option<Room>, devices: Bus) -> Machine {
        let (space, rewriting) = (self.placement.per_space(), self.state.rewriting());
        let system_call = self.facts.gates.system_call;
        let copies = room.map(|room| PatchedCopies::new(room, system_call, space, rewriting));
        let resident = Resident::new(self.most_mapped, copies);
        Machine::new(self.state, self.memory, devices, self.placement, self.places, resident)
            .with_local(self.local)
            .with_reports(self.options.verbose)
    }
}

/// The parts of a machine that only some of its processes have.
#[derive(Default)]
struct Parts {
    debugger: Option<Debugger>,
    saving: Option<Saving>,
    restored: Option<Vec<u8>>,
}

/// Does everything that can go wrong before the host's system calls are given up.
fn prepare_processor(
    machine: &mut Machine,
    beginning: Beginning,
    restored: Option<&[u8]>,
    isolation: Isolation,
    special: &Special,
) -> Result<()> {
    match restored {
        Some(state) => machine.load_state(state)?,
        None if machine.placement().prepares_processor() => beginning.begin(machine),
        None => {}
    }
    if machine.placement().runs_guest() {
        signal::dispatch_system_calls()?;
    }
    // A restored machine begins at once: a process that is not prepared yet gets its first turn when it is.
    if let Some(space) = machine.placement().per_space().filter(|_| restored.is_none()) {
        space.await_others()?;
    }
    if let Some(one) = machine.processor() {
        one.is_ready();
        if one.is_first() {
            one.await_others()?;
        }
    }
    sandbox::forbid_calls(isolation, special)
}

/// Puts the code for slots at its address, with the first code and the gates.
fn place_code(code: &[u8]) -> Result<()> {
    let to: *mut u8 = std::ptr::with_exposed_provenance_mut(THUNKS as usize);
    if code.len() as u64 > THUNKS_SIZE {
        return Err(Error::new("the kernel has too many slots").hint(
            "switch parts of the kernel off in its configuration, or make them modules, and build it again",
        ));
    }
    process::map_private(THUNKS, THUNKS_SIZE, libc::PROT_READ | libc::PROT_WRITE)?;
    // SAFETY: The range was mapped above, and the code fits.
    let done = unsafe {
        std::ptr::copy_nonoverlapping(code.as_ptr(), to, code.len());
        libc::mprotect(to.cast(), THUNKS_SIZE as usize, libc::PROT_READ | libc::PROT_EXEC)
    };
    if done != 0 {
        return Err(Error::system("make the code for slots executable"));
    }
    Ok(())
}

fn prepare_block(system_return: u64) -> Result<()> {
    block::map()?;
    let stack = process::map_stack(STACK as usize)?;
    let extended = process::map_common(cpuid::extended_size() as usize)?;
    let block = block::get();
    block.entry.set(entry::hosted_exit as *const () as u64);
    block.system_return.set(system_return);
    block.stack.set((stack.expose_provenance() as u64 + STACK) & !63);
    block.extended.set(extended.expose_provenance() as u64);
    let base: u64;
    // SAFETY: `check_host` has seen that it is allowed.
    unsafe { std::arch::asm!("rdfsbase {}", out(reg) base, options(nomem, nostack, preserves_flags)) };
    block.monitor_fs.set(base);
    Ok(())
}

/// Unmaps the code and constants of this program and of its libraries, most of which only the start needs.
/// The host maps again what is used from here on.
fn forget_the_start() {
    for part in constant_parts() {
        let start = ptr::with_exposed_provenance_mut(part.start);
        // SAFETY: The range begins at a page, and has nothing but files' pages, which nothing has written to.
        unsafe { libc::madvise(start, part.end - part.start, libc::MADV_DONTNEED) };
    }
}

/// Returns where the program and its libraries have what nothing writes to. Processes made after the first
/// call have the answer in common.
fn constant_parts() -> &'static [Range<usize>] {
    static PARTS: OnceLock<Vec<Range<usize>>> = OnceLock::new();
    unsafe extern "C" fn add(
        object: *mut libc::dl_phdr_info,
        _size: libc::size_t,
        parts: *mut c_void,
    ) -> libc::c_int {
        // SAFETY: The C library gives an object with its headers, and the caller a list, for this call.
        let (object, parts) = unsafe { (&*object, &mut *parts.cast::<Vec<Range<usize>>>()) };
        // SAFETY: As above.
        let headers = unsafe { slice::from_raw_parts(object.dlpi_phdr, object.dlpi_phnum.into()) };
        let is_constant =
            |header: &&libc::Elf64_Phdr| header.p_type == libc::PT_LOAD && header.p_flags & libc::PF_W == 0;
        parts.extend(headers.iter().filter(is_constant).map(|header| {
            let start = object.dlpi_addr + header.p_vaddr;
            (start & !(PAGE - 1)) as usize..(start + header.p_memsz).next_multiple_of(PAGE) as usize
        }));
        0
    }
    PARTS.get_or_init(|| {
        let mut parts = Vec::new();
        // SAFETY: The function is called with the list, before the call returns. The kernel gives the number.
        let kernels = unsafe {
            libc::dl_iterate_phdr(Some(add), (&raw mut parts).cast());
            libc::getauxval(libc::AT_SYSINFO_EHDR) as usize
        };
        // The kernel's own object is in no file.
        parts.retain(|part: &Range<usize>| !part.contains(&kernels));
        parts
    })
}

/// Checks the host's processor and kernel.
fn check_host() -> Result<()> {
    const FSGSBASE: u64 = 2;
    // SAFETY: It takes a number.
    let capabilities = unsafe { libc::getauxval(libc::AT_HWCAP2) };
    if capabilities & FSGSBASE == 0 {
        return Err(Error::host("the host does not let processes set the bases of FS and GS (FSGSBASE)")
            .hint("use a processor from 2012 (Intel) or 2017 (AMD) on, with a kernel from 5.9 on"));
    }
    if !cpuid::has_xsave() {
        return Err(Error::host("the host's processor or kernel has no XSAVE"));
    }
    Ok(())
}

/// Measures the frequency of the time stamp counter by the host's clock.
pub(crate) fn clock_khz() -> u64 {
    const MEASURE: Duration = Duration::from_millis(30);
    /// The host may run something else between two instructions. The quickest of several attempts counts.
    const ATTEMPTS: u32 = 16;
    let attempt = |_| {
        // SAFETY: Reading it is allowed, or the C library would not work.
        let ticks = || unsafe { _rdtsc() };
        let (before, time, after) = (ticks(), now(), ticks());
        (after - before, before + (after - before) / 2, time)
    };
    let read = || (0..ATTEMPTS).map(attempt).min().map_or((0, 0), |(_, ticks, time)| (ticks, time));
    let (ticks, time) = read();
    thread::sleep(MEASURE);
    let (later_ticks, later) = read();
    let elapsed = (later - time).max(1);
    u64::try_from(u128::from(later_ticks - ticks) * 1_000_000 / u128::from(elapsed)).unwrap_or(0)
}

/// Starts this program again without random addresses, if the host has chosen some. The addresses
/// of [`crate::layout`] are free only then. The same is true for addresses from below, as the host
/// chooses them for a stack without limits.
///
/// # Errors
/// If the host does not allow it.
fn without_randomization() -> Result<()> {
    const UNCHANGED: libc::c_ulong = 0xFFFF_FFFF;
    // SAFETY: It takes a number.
    let now = unsafe { libc::personality(UNCHANGED) };
    let wanted = (now | libc::ADDR_NO_RANDOMIZE) & !libc::ADDR_COMPAT_LAYOUT;
    let is_stack_fit = limits::fit_stack()?;
    if now == wanted && is_stack_fit {
        return Ok(());
    }
    // SAFETY: It takes a number.
    if now < 0 || unsafe { libc::personality(wanted as libc::c_ulong) } < 0 {
        return Err(Error::system("switch random addresses off (personality)"));
    }
    let words: std::result::Result<Vec<CString>, _> = std::env::args_os()
        .map(|word| CString::new(std::os::unix::ffi::OsStringExt::into_vec(word)))
        .collect();
    let words = words.map_err(|_| Error::bug("an argument contains a zero byte"))?;
    let pointers: Vec<*const libc::c_char> =
        words.iter().map(|word| word.as_ptr()).chain([std::ptr::null()]).collect();
    // SAFETY: The list of strings ends with a null pointer.
    unsafe { libc::execv(c"/proc/self/exe".as_ptr(), pointers.as_ptr()) };
    Err(Error::system("start again without random addresses"))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A saved machine is refused where the counter differs by more than a thousandth.
    #[test]
    fn the_counter_is_measured_alike_each_time() {
        let all: Vec<u64> = (0..20).map(|_| clock_khz()).collect();
        let (least, most) =
            all.iter().fold((u64::MAX, 0), |(least, most), one| (least.min(*one), most.max(*one)));
        assert!(most - least < least / 5000, "{all:?}");
    }

    #[test]
    fn a_disk_is_named_with_its_use() {
        let disk = |text: &str| DiskOption::from(text);
        for (text, path, access) in [
            ("root.img", "root.img", DiskAccess::Write),
            ("root.img,ro", "root.img", DiskAccess::Read),
            ("a,b,shared", "a,b", DiskAccess::Shared),
            ("root.img,private", "root.img", DiskAccess::Private),
            ("root.img,other", "root.img,other", DiskAccess::Write),
        ] {
            assert_eq!(disk(text), DiskOption { path: path.into(), access });
            assert_eq!(access.is_memory(), text.ends_with("shared") || text.ends_with("private"));
        }
    }
}
