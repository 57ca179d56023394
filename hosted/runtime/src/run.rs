//! Starts a machine: everything that can be wrong is found before the guest runs.

use std::{
    arch::x86_64::_rdtsc,
    collections::HashMap,
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
    devices::{Block, Console, Devices, NetOption, Slots, now},
    entry,
    error::{Error, Result},
    gdb::{self, Debugger},
    isolation::{Spaces, mappings::Mappings},
    kernel::Kernel,
    layout::{THUNKS, THUNKS_SIZE},
    limits::{self, Limits},
    load,
    machine::{Counters, Machine},
    memory::Memory,
    patched::{self, Shadows},
    process::per_space::{self, Common, Home},
    sandbox::{self, Special},
    signal,
    smp::{self, Processor, apic::Apic, bus::Bus},
    thunks::{self, Exit, Gates},
    vcpu::Vcpu,
};

/// What is wanted.
#[derive(Clone, Debug)]
pub struct Options {
    /// The pre-virtualized `vmlinux`.
    pub kernel: PathBuf,
    /// Its first file system.
    pub initramfs: Option<PathBuf>,
    /// Its disks.
    pub disks: Vec<DiskOption>,
    /// Where gdb may connect to.
    pub gdb: Option<GdbOption>,
    /// Its network card.
    pub net: Option<NetOption>,
    /// Bytes of memory.
    pub memory: u64,
    /// More for the command line.
    pub append: String,
    /// Processors.
    pub cpus: usize,
    /// What programs are kept apart by.
    pub isolation: Isolation,
    /// Rewrite programs' system calls, if they run in this process.
    pub rewrite: bool,
    /// Say what is strange, and what was counted.
    pub verbose: bool,
}

/// What keeps the guest's programs apart from its kernel and from the monitor.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Isolation {
    /// Nothing.
    #[default]
    None,
    /// The host: they run in processes of their own.
    Process,
}

/// A disk that is wanted: a file, and `,ro` if it is only to be read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiskOption {
    /// The file.
    pub path: PathBuf,
    /// Whether the guest only reads it.
    pub read_only: bool,
}

impl From<&str> for DiskOption {
    fn from(text: &str) -> Self {
        let (path, read_only) = text.strip_suffix(",ro").map_or((text, false), |path| (path, true));
        Self { path: path.into(), read_only }
    }
}

/// What was found in a kernel that was loaded.
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
    signal::ignore_file_size();
    let limits = Limits::default();
    limits.mappings()?;
    limits.memory(options.memory)?;
    check_processors(options)?;
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

/// Starts it. The process ends when the machine does; this comes back only with an error.
///
/// # Errors
/// Whatever is in the way.
pub fn run(options: &Options) -> Result<Infallible> {
    without_randomization()?;
    sandbox::close_inherited()?;
    let limits = Limits::default();
    limits.addresses()?;
    signal::ignore_file_size();
    let most_mapped = limits.mappings()?;
    limits.memory(options.memory)?;
    check_processors(options)?;
    let Prepared { mut kernel, memory, mut loaded } = prepare(options)?;
    let bringup = (options.cpus > 1).then(|| Bringup::of(&kernel, &loaded)).transpose()?;
    let initramfs = read_initramfs(options)?;
    let mut disks = open_disks(options)?;
    let gdb = options.gdb.as_ref().map(gdb::open).transpose()?;
    let uplink = options.net.as_ref().map(NetOption::open).transpose()?;
    let placed = place_code(&kernel, &loaded)?;
    if gdb.is_none() {
        // Processes that are made from here on have no more of it, either.
        kernel.is_loaded();
        (loaded.slots, loaded.thunks) = Default::default();
    }
    give_memory_back();
    if !sandbox::forbid_files()? && options.verbose {
        eprintln!("mercury hosted: the host's kernel has no Landlock");
    }
    let clock_khz = clock_khz();
    // Before there are threads, for these processes begin as copies of this one.
    let first = (options.cpus > 1).then(|| Processor::first(options.cpus)).transpose()?;
    let processor = first.map(Processor::multiply).transpose()?;
    let is_first = processor.is_none_or(|one| one.is_first());
    let spaces = match options.isolation {
        Isolation::None => None,
        Isolation::Process => Some(Spaces::start(&memory, most_mapped)?),
    };
    let returning = &placed.gates;
    prepare_block(match options.isolation {
        Isolation::None => returning.system_return,
        Isolation::Process => returning.leaving,
    })?;
    let state = State {
        vcpu: Common::new(Vcpu::default())?,
        counters: Common::new(Counters::default())?,
        rewriting: Common::new(patched::Counters::default())?.share(),
    };
    let home = match options.isolation {
        // A debugger and several processors know of one process for all address spaces.
        Isolation::None if options.cpus == 1 && gdb.is_none() => {
            Home::multiply(&memory, limits.homes(options.memory))?
        }
        _ => None,
    };
    // Threads that listen to devices send signals from their start on.
    signal::install()?;
    let apic = processor.map(|one| Apic::new(one, clock_khz)).transpose()?;
    let processors = processor.map_or_else(Vec::new, |one| one.processes());
    let start = Start {
        options,
        kernel,
        loaded,
        memory,
        placed,
        most_mapped,
        spaces,
        state,
        home,
        processor,
        apic,
        bringup,
    };
    if home.is_some_and(|home| !home.is_first()) {
        // They are the first process'.
        std::mem::forget((disks, uplink, gdb));
        sandbox::keep_only(start.memory.descriptor())?;
        let bound = home.map_or_else(Vec::new, |home| home.processes());
        return start.run(Bus::Absent, None, Special { bound, ..Special::default() });
    }
    if let Some(home) = home.filter(|home| home.are_few() && options.verbose) {
        eprintln!("mercury hosted: the host allows {} processes for address spaces", home.count());
    }
    let processors = home.map_or(processors, |home| home.processes());
    if let Some(one) = processor
        && !is_first
    {
        // They are the first processor's; what ends with them must not end here.
        std::mem::forget((disks, uplink, gdb));
        return start.run(Bus::Other(one), None, Special { processors, ..Special::default() });
    }
    for disk in &mut disks {
        if let Err(error) = disk.overlap()
            && options.verbose
        {
            eprintln!("mercury hosted: no io_uring ({error}): a disk's requests are done one by one");
        }
    }
    let debugger = gdb.map(|gdb| Debugger::new(gdb, &start.kernel, &start.loaded)).transpose()?;
    let special = Special {
        rings: disks.iter().filter_map(Block::ring).collect(),
        listener: debugger.as_ref().map(Debugger::descriptor),
        processors,
        bound: home.map_or_else(Vec::new, |home| home.processes()),
    };
    let net = uplink.map(|uplink| uplink.start()).transpose()?;
    let slots = Slots::new(disks, net)?;
    let line = boot::command_line(&options.append, clock_khz, options.cpus) + &slots.describe(&start.memory);
    boot::describe(&start.memory, &start.kernel, &line, &initramfs)?;
    if options.cpus > 1 {
        boot::describe_processors(&start.memory, options.cpus)?;
    }
    let console = Console::open()?;
    let devices = Devices::new(console, &start.memory, slots)?;
    start.run(Bus::Own(Box::new(devices)), debugger, special)
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
        return Err(Error::new("gdb is for machines with one processor").hint("leave out --cpus or --gdb"));
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
        return Err(Error::new(format!("{} MiB of memory are too little", options.memory >> 20))
            .hint(format!("a kernel needs {} MiB or more: --memory", LEAST_MEMORY >> 20)));
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
        accounted.map_err(|_| Error::new("cannot account for the kernel: this is a bug"))??;
        loaded
    })?;
    Ok(Prepared { kernel, memory, loaded })
}

/// Holds the kernel's code against its records, as the afterburner does behind a build. A sensitive instruction without one would
/// trap at best, and at worst be the host's.
///
/// # Errors
/// The first of what is wrong.
fn account_for(kernel: &Path) -> Result<()> {
    const HOW: &str =
        "`afterburner verify` names all that is wrong; `afterburner make` builds kernels without";
    let account = verify::verify(kernel).map_err(|error| Error::new(error.to_string()).hint(HOW))?;
    let Some(first) = account.findings.first() else { return Ok(()) };
    let others = match account.findings.len() - 1 {
        0 => String::new(),
        more => format!(", and {more} more"),
    };
    Err(Error::new(format!("{}: {} in {}{others}", kernel.display(), first.what, first.function)).hint(HOW))
}

/// What processes of one processor have in common, besides the block.
#[derive(Debug)]
struct State {
    vcpu: Common<Vcpu>,
    counters: Common<Counters>,
    rewriting: &'static patched::Counters,
}

/// What every processor's process has when it starts.
struct Start<'a> {
    options: &'a Options,
    kernel: Kernel,
    loaded: load::Loaded,
    memory: Memory,
    placed: Placed,
    most_mapped: u64,
    spaces: Option<Spaces>,
    state: State,
    home: Option<Home>,
    /// Only if there are several.
    processor: Option<Processor>,
    apic: Option<Apic>,
    bringup: Option<Bringup>,
}

impl Start<'_> {
    fn run(self, devices: Bus, debugger: Option<Debugger>, special: Special) -> Result<Infallible> {
        let Placed { entry, gates } = self.placed;
        let (mut loaded, processor, isolation) = (self.loaded, self.processor, self.options.isolation);
        let State { vcpu, counters, rewriting } = self.state;
        let is_elsewhere = self.home.is_some_and(|home| home.is_first());
        let rewrites =
            self.options.rewrite && isolation == Isolation::None && processor.is_none() && !is_elsewhere;
        let mut machine = Machine {
            vcpu,
            other_registers: HashMap::new(),
            memory: self.memory,
            devices,
            processor,
            apic: self.apic,
            bringup: self.bringup,
            exits: Vec::new(),
            guards: loaded.guards.clone(),
            exit_jumps: loaded.exits.iter().map(Exit::jump).collect(),
            kernel_root: loaded.root,
            counters,
            rewriting,
            mapped: 0,
            programs: Mappings::default(),
            most_mapped: self.most_mapped,
            shadows: rewrites.then(|| Shadows::new(gates.system_call, self.home, rewriting)).transpose()?,
            spaces: self.spaces,
            home: self.home,
            returning: gates.returning,
            debugger,
            faulted: None,
            verbose: self.options.verbose,
        };
        let prepared = prepare_processor(&mut machine, &self.kernel, &loaded, entry, isolation, &special);
        prepared.inspect_err(|_| machine.devices.restore())?;
        machine.exits = std::mem::take(&mut loaded.exits);
        machine.exits.push(gates.exit);
        give_back((self.kernel, loaded), self.home);
        machine.run()
    }
}

/// Nobody needs these any more, and they are larger than all that is needed. A home has them from the first process, and nothing of its
/// own as long as it does not touch them.
fn give_back<T>(unneeded: T, home: Option<Home>) {
    if home.is_some_and(|home| !home.is_first()) {
        return std::mem::forget(unneeded);
    }
    drop(unneeded);
    give_memory_back();
}

/// What was allocated and is free again goes back to the host.
fn give_memory_back() {
    // SAFETY: It takes a number.
    unsafe { libc::malloc_trim(0) };
}

/// Everything that can go wrong is done before the host's system calls are given up.
fn prepare_processor(
    machine: &mut Machine,
    kernel: &Kernel,
    loaded: &load::Loaded,
    entry: u64,
    isolation: Isolation,
    special: &Special,
) -> Result<()> {
    // Of homes the first process has the processor prepared, and never runs the guest.
    if machine.home.is_none_or(|home| home.is_first()) {
        boot::processor(machine, kernel, loaded, entry)?;
    }
    if machine.home.is_none_or(|home| !home.is_first()) {
        signal::dispatch_system_calls()?;
    }
    match machine.home {
        Some(home) if home.is_first() => home.await_others()?,
        Some(home) => home.is_ready(),
        None => {}
    }
    if let Some(one) = machine.processor {
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

/// Puts the code for slots where it was made for, and the stub and the code of system calls behind it.
fn place_code(kernel: &Kernel, loaded: &load::Loaded) -> Result<Placed> {
    let thunks = &loaded.thunks;
    block::map_private(THUNKS, THUNKS_SIZE, libc::PROT_READ | libc::PROT_WRITE)?;
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
    let extended = per_space::map_common(cpuid::extended_size() as usize)?;
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

/// What the processor and the kernel of the host must have.
fn check_host() -> Result<()> {
    const FSGSBASE: u64 = 2;
    // SAFETY: It takes a number.
    let capabilities = unsafe { libc::getauxval(libc::AT_HWCAP2) };
    if capabilities & FSGSBASE == 0 {
        return Err(Error::host("the host does not let processes set the bases of FS and GS (FSGSBASE)")
            .hint(
                "the processor has to be of 2012 (Intel) or 2017 (AMD) or later, the kernel 5.9 or later",
            ));
    }
    if !cpuid::has_xsave() {
        return Err(Error::host("the host's processor or kernel has no XSAVE"));
    }
    Ok(())
}

/// The frequency of the time stamp counter, by the host's clock.
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

/// Addresses are only where [`crate::layout`] expects them if the host has not chosen others at random, or from below, as it
/// does for a stack without limits: starts this program again without that.
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
        return Err(Error::system("have fixed addresses (personality)"));
    }
    let words: std::result::Result<Vec<CString>, _> = std::env::args_os()
        .map(|word| CString::new(std::os::unix::ffi::OsStringExt::into_vec(word)))
        .collect();
    let words = words.map_err(|_| Error::new("an argument has a zero byte"))?;
    let pointers: Vec<*const libc::c_char> =
        words.iter().map(|word| word.as_ptr()).chain([std::ptr::null()]).collect();
    // SAFETY: The list of strings ends with a null pointer.
    unsafe { libc::execv(c"/proc/self/exe".as_ptr(), pointers.as_ptr()) };
    Err(Error::system("start again with fixed addresses"))
}
