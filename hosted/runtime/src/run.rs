//! Starts a machine: everything that can be wrong is found before the guest runs.

use std::{
    arch::x86_64::_rdtsc,
    convert::Infallible,
    ffi::CString,
    fs,
    path::{Path, PathBuf},
    thread,
    time::Duration,
};

use mercury_afterburner::verify;
use mercury_hosted_options::gdb::GdbOption;

use crate::{
    block,
    boot::{self, Bringup},
    cpuid,
    devices::{Block, Console, Devices, NetOption, OpenUplink, Slots, now, signal_waker},
    entry,
    error::{Error, Result},
    gdb::{self, Debugger, Opened},
    isolation::ProgramProcesses,
    kernel::Kernel,
    layout::{THUNKS, THUNKS_SIZE},
    limits::{self, Limits},
    load,
    machine::{LoadedCode, LocalProcessor, Machine, Resident, State},
    memory::Memory,
    patched::PatchedCopies,
    process::{self, Placement, per_space::SpaceProcess},
    sandbox::{self, Special},
    signal,
    smp::{self, Processor, bus::Bus},
    thunks::{self, Gates},
};

/// The options of a machine.
#[derive(Clone, Debug)]
pub struct Options {
    /// The pre-virtualized `vmlinux`.
    pub kernel: PathBuf,
    /// Its first file system.
    pub initramfs: Option<PathBuf>,
    pub disks: Vec<DiskOption>,
    /// The address at which gdb may connect.
    pub gdb: Option<GdbOption>,
    pub net: Option<NetOption>,
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
}

/// The separation of the guest's programs from its kernel and from the monitor.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Isolation {
    #[default]
    None,
    /// The host: they run in processes of their own.
    Process,
}

/// A disk that is wanted: a file, and `,ro` if it is only to be read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiskOption {
    pub path: PathBuf,
    /// True if the guest only reads it.
    pub read_only: bool,
}

impl From<&str> for DiskOption {
    fn from(text: &str) -> Self {
        let (path, read_only) = text.strip_suffix(",ro").map_or((text, false), |path| (path, true));
        Self { path: path.into(), read_only }
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

/// A kernel of this kind does not start with less.
pub const LEAST_MEMORY: u64 = 64 << 20;
const STACK: u64 = 1 << 20;

/// Loads the kernel as for a start, and says what was found.
///
/// # Errors
/// What would be in the way of a start, but for networks, debuggers and processes.
pub fn check(options: &Options) -> Result<Report> {
    check_limits(options, &Limits::default())?;
    read_initramfs(options)?;
    open_disks(options)?;
    let prepared = prepare(options)?;
    let loaded = &prepared.loaded;
    Ok(Report {
        filled: loaded.filled,
        left: loaded.unfilled,
        exits: loaded.exits.len(),
        code_bytes: loaded.thunks.len(),
        relocations: loaded.relocated,
        constants: loaded.constants,
    })
}

/// Starts the machine. The process ends when the machine does; the function returns only with an error.
///
/// # Errors
/// The first obstacle.
pub fn run(options: &Options) -> Result<Infallible> {
    without_randomization()?;
    sandbox::close_inherited()?;
    let limits = Limits::default();
    limits.addresses()?;
    let most_mapped = check_limits(options, &limits)?;
    let mut prepared = prepare(options)?;
    let bringup = (options.cpus > 1).then(|| Bringup::of(&prepared.kernel, &prepared.loaded)).transpose()?;
    let files = Files::open(options)?;
    let placed = place_code(&prepared.kernel, &prepared.loaded)?;
    give_up_files(options, &mut prepared)?;
    let clock_khz = clock_khz();
    // Processes are made before there are threads, because they begin as copies of this one.
    let first = (options.cpus > 1).then(|| Processor::first(options.cpus)).transpose()?;
    let processor = first.map(Processor::multiply).transpose()?;
    let isolated = start_program_processes(options, &prepared.memory, most_mapped)?;
    prepare_block(match options.isolation {
        Isolation::None => placed.gates.system_return,
        Isolation::Process => placed.gates.leaving,
    })?;
    let state = State::new()?;
    let placement = match isolated {
        Some(isolated) => Placement::Isolated(Box::new(isolated)),
        None => start_space_processes(options, &prepared.memory, &limits)?,
    };
    // Threads that listen to devices send signals from their start on.
    signal::install()?;
    let local = match (processor, bringup) {
        (Some(one), Some(bringup)) => Some(LocalProcessor::new(one, clock_khz, bringup)?),
        _ => None,
    };
    let start = Start { options, prepared, placed, most_mapped, state, placement, processor, local };
    match start.role() {
        Role::SpaceProcess(space) => start.run_space_process(space, files),
        Role::OtherProcessor(one) => start.run_other_processor(one, files),
        Role::First => start.run_first(files, clock_khz),
    }
}

/// Checks the host's limits. Returns the number of mappings that the host allows.
fn check_limits(options: &Options, limits: &Limits) -> Result<u64> {
    signal::ignore_file_size();
    let most_mapped = limits.mappings()?;
    limits.memory(options.memory)?;
    check_processors(options)?;
    Ok(most_mapped)
}

/// The files and connections of the machine, opened before the process gives up opening any.
struct Files {
    initramfs: Vec<u8>,
    disks: Vec<Block>,
    gdb: Option<Opened>,
    uplink: Option<OpenUplink>,
}

impl Files {
    fn open(options: &Options) -> Result<Self> {
        Ok(Self {
            initramfs: read_initramfs(options)?,
            disks: open_disks(options)?,
            gdb: options.gdb.as_ref().map(gdb::open).transpose()?,
            uplink: options.net.as_ref().map(NetOption::open).transpose()?,
        })
    }

    /// Leaves the files to the process that serves the devices: closing them would end what goes on there.
    fn leave(self) {
        std::mem::forget((self.disks, self.uplink, self.gdb));
    }
}

/// Gives up opening files, and returns memory that no process needs any more to the host.
fn give_up_files(options: &Options, prepared: &mut Prepared) -> Result<()> {
    if options.gdb.is_none() {
        // Processes that are made from here on have no more of it, either.
        prepared.kernel.is_loaded();
        (prepared.loaded.slots, prepared.loaded.thunks) = Default::default();
    }
    give_memory_back();
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

/// Makes a process for each address space, if the options allow it and the host has room.
fn start_space_processes(options: &Options, memory: &Memory, limits: &Limits) -> Result<Placement> {
    // A debugger and several processors know of one process for all address spaces.
    if options.cpus > 1 || options.gdb.is_some() {
        return Ok(Placement::One);
    }
    let space = SpaceProcess::multiply(memory, limits.space_processes(options.memory))?;
    Ok(space.map_or(Placement::One, Placement::PerSpace))
}

fn read_initramfs(options: &Options) -> Result<Vec<u8>> {
    let read = |path: &PathBuf| fs::read(path).map_err(|error| Error::file("read", path, error));
    options.initramfs.as_ref().map_or_else(|| Ok(Vec::new()), read)
}

fn open_disks(options: &Options) -> Result<Vec<Block>> {
    options.disks.iter().map(|disk| Block::open(&disk.path, disk.read_only)).collect()
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

struct Prepared {
    kernel: Kernel,
    memory: Memory,
    loaded: load::Loaded,
}

fn prepare(options: &Options) -> Result<Prepared> {
    check_host()?;
    if options.memory < LEAST_MEMORY {
        return Err(Error::new(format!("{} MiB of memory are not enough", options.memory >> 20))
            .hint(format!("give the guest {} MiB or more with --memory", LEAST_MEMORY >> 20)));
    }
    let bytes = fs::read(&options.kernel).map_err(|error| Error::file("read", &options.kernel, error))?;
    let kernel = Kernel::parse(&bytes).map_err(|error| error.about(options.kernel.display()))?;
    drop(bytes);
    // What a thread's own arena has had is not given back.
    // SAFETY: It takes numbers.
    unsafe { libc::mallopt(libc::M_ARENA_MAX, 1) };
    let (memory, loaded) = thread::scope(|scope| {
        let accounted = scope.spawn(|| account_for(&options.kernel));
        let loaded = Memory::new(options.memory).and_then(|memory| {
            load::load(&kernel, &memory, options.isolation).map(|loaded| (memory, loaded))
        });
        let accounted = accounted.join();
        accounted.map_err(|_| Error::new("cannot check the kernel's code: this is a bug"))??;
        loaded
    })?;
    Ok(Prepared { kernel, memory, loaded })
}

/// Checks the kernel's code against its records, as the afterburner does after a build. A sensitive
/// instruction without a record would trap at best. At worst it would take effect on the host.
///
/// # Errors
/// The first of what is wrong.
fn account_for(kernel: &Path) -> Result<()> {
    const HOW: &str =
        "list all errors with `afterburner verify`, and build the kernel with `afterburner make`";
    let account = verify::verify(kernel).map_err(|error| Error::new(error.to_string()).hint(HOW))?;
    let Some(first) = account.findings.first() else { return Ok(()) };
    let others = match account.findings.len() - 1 {
        0 => String::new(),
        more => format!(", and {more} more"),
    };
    Err(Error::new(format!("{}: {} in {}{others}", kernel.display(), first.what, first.function)).hint(HOW))
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
    prepared: Prepared,
    placed: Placed,
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

    fn run_space_process(self, space: SpaceProcess, files: Files) -> Result<Infallible> {
        files.leave();
        sandbox::keep_only(self.prepared.memory.descriptor())?;
        self.run(Bus::Absent, None, Special { bound: space.processes(), ..Special::default() })
    }

    fn run_other_processor(self, one: Processor, files: Files) -> Result<Infallible> {
        files.leave();
        self.run(Bus::Other(one), None, Special { processors: one.processes(), ..Special::default() })
    }

    fn run_first(self, files: Files, clock_khz: u64) -> Result<Infallible> {
        let Files { initramfs, mut disks, gdb, uplink } = files;
        let space = self.placement.per_space();
        if let Some(space) = space.filter(|space| space.are_few() && self.options.verbose) {
            eprintln!("mercury hosted: the host allows {} processes for address spaces", space.count());
        }
        self.overlap_requests(&mut disks);
        let Prepared { kernel, memory, loaded } = &self.prepared;
        let debugger = gdb.map(|gdb| Debugger::new(gdb, kernel, loaded)).transpose()?;
        let bound = space.map_or_else(Vec::new, |space| space.processes());
        let processors = self.processor.map_or_else(|| bound.clone(), |one| one.processes());
        let special = Special {
            rings: disks.iter().filter_map(Block::ring).collect(),
            listener: debugger.as_ref().map(Debugger::descriptor),
            processors,
            bound,
        };
        let net = uplink.map(|uplink| uplink.start(signal_waker())).transpose()?;
        let slots = Slots::new(disks, net)?;
        self.describe(&slots, &initramfs, clock_khz)?;
        let devices = Devices::new(Console::open()?, memory, slots)?;
        self.run(Bus::Own(Box::new(devices)), debugger, special)
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
    fn describe(&self, slots: &Slots, initramfs: &[u8], clock_khz: u64) -> Result<()> {
        let Prepared { kernel, memory, .. } = &self.prepared;
        let own = boot::command_line(&self.options.append, clock_khz, self.options.cpus);
        boot::describe(memory, kernel, &(own + &slots.describe(memory)), initramfs)?;
        if self.options.cpus > 1 {
            boot::describe_processors(memory, self.options.cpus)?;
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

    fn run(self, devices: Bus, debugger: Option<Debugger>, special: Special) -> Result<Infallible> {
        let rewrites = self.rewrites();
        let (space, rewriting) = (self.placement.per_space(), self.state.rewriting());
        let Placed { entry, gates } = self.placed;
        let Prepared { kernel, memory, mut loaded } = self.prepared;
        let copies = rewrites.then(|| PatchedCopies::new(gates.system_call, space, rewriting)).transpose()?;
        let resident = Resident::new(self.most_mapped, copies);
        let code = LoadedCode::new(&mut loaded, &gates);
        let mut machine = Machine::new(self.state, memory, devices, self.placement, code, resident)
            .with_local(self.local)
            .with_debugger(debugger)
            .with_reports(self.options.verbose);
        let isolation = self.options.isolation;
        let prepared = prepare_processor(&mut machine, &kernel, &loaded, entry, isolation, &special);
        prepared.inspect_err(|_| machine.restore_terminal())?;
        give_back((kernel, loaded), space);
        machine.run()
    }
}

/// Drops the kernel's file, which is larger than all that the machine needs. An address-space
/// process has it from the first process, and takes no memory as long as it does not touch it.
fn give_back<T>(unneeded: T, space: Option<SpaceProcess>) {
    if space.is_some_and(|space| !space.is_first()) {
        return std::mem::forget(unneeded);
    }
    drop(unneeded);
    give_memory_back();
}

/// Returns freed memory to the host.
fn give_memory_back() {
    // SAFETY: It takes a number.
    unsafe { libc::malloc_trim(0) };
}

/// Does everything that can go wrong before the host's system calls are given up.
fn prepare_processor(
    machine: &mut Machine,
    kernel: &Kernel,
    loaded: &load::Loaded,
    entry: u64,
    isolation: Isolation,
    special: &Special,
) -> Result<()> {
    if machine.placement().prepares_processor() {
        boot::processor(machine, kernel, loaded, entry)?;
    }
    if machine.placement().runs_guest() {
        signal::dispatch_system_calls()?;
    }
    match machine.placement().per_space() {
        Some(space) if space.is_first() => space.await_others()?,
        Some(space) => space.is_ready(),
        None => {}
    }
    if let Some(one) = machine.processor() {
        one.is_ready();
        if one.is_first() {
            one.await_others()?;
        }
    }
    sandbox::forbid_calls(isolation, special)
}

/// The stub to start with, and the code of system calls.
struct Placed {
    entry: u64,
    gates: Gates,
}

/// Puts the thunks at their address, and the first code and the code of system calls after them.
fn place_code(kernel: &Kernel, loaded: &load::Loaded) -> Result<Placed> {
    let thunks = &loaded.thunks;
    process::map_private(THUNKS, THUNKS_SIZE, libc::PROT_READ | libc::PROT_WRITE)?;
    let entry = THUNKS + (thunks.len() as u64).next_multiple_of(16);
    let stub = boot::stub(kernel, entry)?;
    let behind = (entry + stub.len() as u64).next_multiple_of(64);
    let gates = thunks::gates(behind, loaded.exits.len())?;
    let place = |at: u64, bytes: &[u8]| {
        let to: *mut u8 = std::ptr::with_exposed_provenance_mut(at as usize);
        // SAFETY: The range was mapped above, and all of it fits: the loader has checked it.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) };
    };
    place(THUNKS, thunks);
    place(entry, &stub);
    place(behind, &gates.code);
    // SAFETY: The range was mapped above.
    let done = unsafe {
        libc::mprotect(
            std::ptr::with_exposed_provenance_mut(THUNKS as usize),
            THUNKS_SIZE as usize,
            libc::PROT_READ | libc::PROT_EXEC,
        )
    };
    if done != 0 {
        return Err(Error::system("make the code for slots executable"));
    }
    Ok(Placed { entry, gates })
}

fn prepare_block(system_return: u64) -> Result<()> {
    block::map()?;
    let stack = Box::leak(vec![0_u8; STACK as usize].into_boxed_slice());
    let extended = process::map_common(cpuid::extended_size() as usize)?;
    let block = block::get();
    block.entry.set(entry::hosted_exit as *const () as u64);
    block.system_return.set(system_return);
    block.stack.set((stack.as_ptr().expose_provenance() as u64 + STACK) & !63);
    block.extended.set(extended.expose_provenance() as u64);
    let base: u64;
    // SAFETY: `check_host` has seen that it is allowed.
    unsafe { std::arch::asm!("rdfsbase {}", out(reg) base, options(nomem, nostack, preserves_flags)) };
    block.monitor_fs.set(base);
    Ok(())
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
fn clock_khz() -> u64 {
    const MEASURE: Duration = Duration::from_millis(30);
    // SAFETY: Reading it is allowed, or the C library would not work.
    let read = || unsafe { (_rdtsc(), now()) };
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
    let words = words.map_err(|_| Error::new("an argument contains a zero byte"))?;
    let pointers: Vec<*const libc::c_char> =
        words.iter().map(|word| word.as_ptr()).chain([std::ptr::null()]).collect();
    // SAFETY: The list of strings ends with a null pointer.
    unsafe { libc::execv(c"/proc/self/exe".as_ptr(), pointers.as_ptr()) };
    Err(Error::system("start again without random addresses"))
}
