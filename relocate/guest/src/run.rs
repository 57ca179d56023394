//! A guest from its image to its end.

use crate::{
    acpi::{Firmware, Tables},
    calls::{Calls, PORTS, WriteLog},
    clones, cpu,
    disks::{self, OwnDisk},
    entry,
    fit::{self, Host, Limits, Reason, kvm_refused},
    image::{self, Image},
    layout::{KVM_PAGES, Layout, MONITOR, TAKEN},
    memory,
    platform::{
        Board, End, Lines, Platform,
        local::{self, Worker},
        words::Words,
    },
    sandbox,
    time::{self, Able, Clock},
    wires::{Wire, Wires},
};
use kvm_bindings::{CpuId, KVM_MEM_LOG_DIRTY_PAGES, KVM_PIT_SPEAKER_DUMMY, kvm_msi, kvm_pit_config};
use kvm_ioctls::{Kvm, VcpuExit, VcpuFd, VmFd};
use mercury_abi::{code::Code, guest::GuestDescription};
use mercury_control::{
    error::{Error, Result},
    exit::Exit,
};
use mercury_devices::{
    Bell, Block, NetOption, Rng, Witness,
    memory::{View, write},
    signals::{Waker, spawn, start_thread},
    terminal,
    virtio::Device,
};
use mercury_image::{Identity, Machine, Timers};
use mercury_quiesce::returned;
use std::{
    fs,
    io::{self, Read},
    num::NonZero,
    ops::Range,
    os::{fd::RawFd, unix::thread::JoinHandleExt},
    path::{Path, PathBuf},
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, RwLock},
    thread::{self, JoinHandle},
    time::{Duration, SystemTime},
};

/// File about this process's memory.
const SMAPS: &str = "/proc/self/smaps";
/// Device of the host that makes guests.
const KVM: &str = "/dev/kvm";
/// Time after which a processor that has missed a signal is called again.
const AGAIN: Duration = Duration::from_millis(10);
/// Time for the readers of consoles at the end.
const LAST_WORDS: Duration = Duration::from_secs(2);

/// A disk of the guest's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Disk {
    /// A raw image or a block device.
    pub path: PathBuf,
    /// True if the guest only reads it.
    pub read_only: bool,
}

/// The other ends of the serial ports.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Console {
    /// The first port is standard input and output, the second a socket.
    Terminal {
        /// Path of the second port's socket.
        second: PathBuf,
    },
    Sockets {
        /// Path of the first port's socket.
        first: PathBuf,
        /// Path of the second port's socket.
        second: PathBuf,
    },
}

/// The options of a guest.
#[derive(Clone, Debug)]
pub struct Options {
    /// Disks, in their order.
    pub disks: Vec<Disk>,
    pub net: Option<NetOption>,
    /// The other ends of the serial ports.
    pub console: Console,
    /// Path of the socket for orders to the guest.
    pub orders: PathBuf,
    /// Path of the pipe for the operator's words.
    pub words: PathBuf,
}

/// A machine that can be a guest of this host. Nothing was changed.
#[derive(Debug)]
pub struct Plan {
    kvm: Kvm,
    machine: Machine,
    firmware: Firmware,
    tables: Tables,
    layout: Layout,
    cpuid: CpuId,
    controllers: Vec<disks::Controller>,
    locks: Vec<fs::File>,
}

impl Plan {
    /// Checks that a machine can be a guest here, with devices for these drivers of its kernel, with the
    /// contents of its own disks, and with no more memory and processors than this.
    ///
    /// # Errors
    /// Names every reason against it.
    pub fn of(machine: Machine, drivers: &[&'static str], own: &[OwnDisk], limits: Limits) -> Result<Self> {
        let firmware = image::firmware(&machine)?;
        let tables = Tables::find(&firmware);
        let layout = Layout::of(&machine);
        let kvm = open_kvm()?;
        let cpuid = cpu::offered(&kvm, &machine)?;
        let (cpus_max, available, clock) = (kvm.get_max_vcpus(), available_memory()?, Clock::of(&kvm)?);
        // Without an answer of the host, KVM's own limit is all that is known.
        let cpus_usable = thread::available_parallelism().map_or(cpus_max, NonZero::get);
        let cpuid_offered = cpuid.as_slice();
        let host = Host { cpuid: cpuid_offered, cpus_max, cpus_usable, available, limits, drivers, clock };
        let taken = layout.as_ref().map_or(Vec::new(), |layout| [layout.ranges(), &TAKEN].concat());
        let own = disks::Plan::of(&machine, own, &taken, cpu::addresses_end(cpuid.as_slice()))?;
        let mut reasons = fit::reasons(&machine, &layout, &tables, &host);
        reasons.extend(own.reasons.into_iter().map(|why| Reason::new(Code::GuestDisks, why)));
        fit::refuse(&reasons)?;
        let (tables, layout, controllers, locks) = (tables?, layout?, own.controllers, own.locks);
        Ok(Self { kvm, machine, firmware, tables, layout, cpuid, controllers, locks })
    }

    /// Takes files that lock the contents of the machine's own disks, also after the guest has failed.
    pub fn take_locks(&mut self) -> Vec<fs::File> {
        std::mem::take(&mut self.locks)
    }

    /// Returns the description of the machine.
    #[must_use]
    pub fn machine(&self) -> &Machine {
        &self.machine
    }

    /// Returns the size of the guest's memory in bytes.
    #[must_use]
    pub fn memory(&self) -> u64 {
        self.layout.bytes()
    }

    /// Opens the guest's devices, and maps its memory with the firmware's content. The witness sees each
    /// frame that the guest sends by its network card.
    ///
    /// # Errors
    /// A disk, the network or the host's memory is in the way.
    pub fn prepare(self, options: &Options, witness: Option<Witness>) -> Result<Prepared> {
        let view = memory::map(&self.layout)?;
        image::load_firmware(&self.firmware, &view)?;
        self.prepare_with(view, options, witness)
    }

    /// Makes the guest, for memory that has the firmware's content. What the host can refuse, it refuses
    /// here: a machine that moves here has not stopped yet.
    fn prepare_with(mut self, view: View, options: &Options, witness: Option<Witness>) -> Result<Prepared> {
        let bell = Arc::new(Bell::new().map_err(failed)?);
        let ring = Arc::clone(&bell);
        let waker: Waker = Arc::new(move || ring.ring());
        let (devices, rings) = open_devices(options, witness, &waker)?;
        let mut wires = Wires::default();
        let ports = open_wires(&options.console, &waker, &mut wires)?;
        let orders = wires.add(Wire::private_socket(&options.orders, Arc::clone(&waker))?);
        let vm = Arc::new(make_vm(&self.kvm, &view)?);
        time::prepare(&vm, &self.machine, Able::of(&self.kvm))?;
        let lines: Arc<dyn Lines> = Arc::new(Chip(Arc::clone(&vm)));
        let controllers = std::mem::take(&mut self.controllers).into_iter();
        let started = controllers.map(|one| local::start(one, &view, &lines));
        let (locals, workers) = started.collect::<Result<Vec<_>>>()?.into_iter().unzip();
        let mut platform = Platform::new(lines, self.board(locals), ports, orders, devices, view.clone())?;
        platform.set_words(Words::open(&options.words)?);
        let tables = entry::Tables::make(&view, &self.machine)?;
        let make = |one| cpu::make(&vm, &self.cpuid, &tables, &self.machine, one);
        let processors = self.machine.cpus.iter().map(make).collect::<Result<Vec<VcpuFd>>>()?;
        let calls = Calls::new(view.clone(), Box::new(Slots { vm: Arc::clone(&vm), view: view.clone() }));
        let calls = calls.map_err(|error| {
            Error::new(Exit::Impossible, format!("cannot prepare for a move of the guest: {error}"))
                .hint(crate::SHORT_OF)
        })?;
        let smaps = fs::File::open(SMAPS).ok().map(Arc::new);
        let is_at_terminal = matches!(options.console, Console::Terminal { .. });
        let machine = self.machine;
        let prepared = Prepared {
            machine,
            processors,
            platform,
            calls,
            bell,
            rings,
            wires,
            workers,
            view,
            smaps,
            is_at_terminal,
            vm,
        };
        Ok(prepared)
    }

    fn board(&self, locals: Vec<local::Local>) -> Board<'_> {
        Board {
            tables: &self.tables,
            devices: &self.machine.devices,
            hpet_hz: self.machine.timers.as_ref().map_or(0, |timers| timers.hpet_hz),
            zeros: unbacked(&self.machine, &self.layout, &self.tables),
            locals,
            clock_ahead_ms: self.machine.timers.as_ref().map_or(0, |timers| timers.rtc_ahead_ms),
        }
    }
}

/// A guest that has devices and processors. Its memory is still to be filled.
pub struct Prepared {
    machine: Machine,
    processors: Vec<VcpuFd>,
    platform: Platform,
    calls: Calls,
    bell: Arc<Bell>,
    rings: Vec<RawFd>,
    wires: Wires,
    workers: Vec<Worker>,
    view: View,
    smaps: Option<Arc<fs::File>>,
    is_at_terminal: bool,
    vm: Arc<VmFd>,
}

impl std::fmt::Debug for Prepared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Prepared").field("machine", &self.machine).finish_non_exhaustive()
    }
}

impl Prepared {
    /// Returns the guest's memory, at its physical addresses.
    #[must_use]
    pub fn memory(&self) -> &View {
        &self.view
    }

    /// Takes the values of clocks that a machine which moves has only after the instant, from its last
    /// description, which has just come.
    pub fn set_timers(&mut self, timers: Option<Timers>) {
        let (Some(own), Some(timers)) = (&mut self.machine.timers, timers) else { return };
        own.tsc = timers.tsc;
        if let Some(ahead) = time::clock_ahead_ms(&timers, SystemTime::now()) {
            self.platform.set_clock(ahead);
        }
    }

    /// Lets the machine go on, whose memory is complete. It runs until [`Running::wait`] returns.
    ///
    /// # Errors
    /// KVM is in the way. The machine has not gone on.
    pub fn start(self) -> Result<Running> {
        let Self { machine, processors, platform, view, .. } = self;
        image::sow_seeds(&machine, &view)?;
        describe(&view, &platform.description())?;
        time::go_on(&processors, machine.timers.as_ref())?;
        let (bell, calls) = (self.bell, self.calls);
        let platform = Mutex::new(platform);
        let shared = Arc::new(Shared { platform, has_ended: Condvar::new(), bell, calls });
        listen(&shared)?;
        ignore_call();
        let threads = begin(processors, &shared)?;
        if self.is_at_terminal {
            terminal::make_raw();
        }
        let (workers, wires, rings, smaps) = (self.workers, self.wires, self.rings, self.smaps);
        Ok(Running { shared, threads, workers, wires, rings, view, smaps, _vm: self.vm })
    }
}

/// Returns true if the machine goes on with its connections and keys. Another life of the same image must not
/// use them again.
fn keeps_connections(machine: &Machine) -> bool {
    machine.ends_connections != Some(true)
}

/// Notes in the image that its machine goes on with its connections, for a later return to hardware. The
/// guest does not reach the image. The user who starts a guest may only be allowed to read it.
fn note_return(path: &Path, identity: Identity, machine: &Machine) {
    if keeps_connections(machine) {
        let _ = returned::note_at(path, Some(identity));
    }
}

/// The machine of an image that can be a guest of this host. Nothing was changed.
#[derive(Debug)]
pub struct Guest {
    image: Image,
    plan: Plan,
    path: PathBuf,
}

impl Guest {
    /// Opens an image, and checks that its machine can be a guest here.
    ///
    /// # Errors
    /// Names every reason against it.
    pub fn prepare(path: &Path, drivers: &[&'static str], own: &[OwnDisk], limits: Limits) -> Result<Self> {
        let image = Image::open(path)?;
        let plan = Plan::of(image.machine().clone(), drivers, own, limits)?;
        Ok(Self { image, plan, path: path.to_owned() })
    }

    /// Returns the description of the machine.
    #[must_use]
    pub fn machine(&self) -> &Machine {
        self.plan.machine()
    }

    /// Returns the image's identity.
    #[must_use]
    pub fn identity(&self) -> Identity {
        self.image.identity()
    }

    /// Returns the size of the guest's memory in bytes.
    #[must_use]
    pub fn memory(&self) -> u64 {
        self.plan.memory()
    }

    /// Returns true if the machine goes on with its connections and keys, which the image then notes.
    #[must_use]
    pub fn keeps_connections(&self) -> bool {
        keeps_connections(self.machine())
    }

    /// Loads the machine and lets it go on. It runs until [`Running::wait`] returns. With a file for the
    /// memory, guests of the same image share what they have not written.
    ///
    /// # Errors
    /// A disk, the network, the image or KVM is in the way. The machine has not gone on.
    pub fn start(mut self, options: &Options, memory_file: Option<&Path>) -> Result<Running> {
        if let Some(path) = memory_file {
            let view = clones::map(path, &mut self.image, &self.plan.firmware, &self.plan.layout)?;
            let prepared = self.plan.prepare_with(view, options, None)?;
            note_return(&self.path, self.image.identity(), self.image.machine());
            return prepared.start();
        }
        let prepared = self.plan.prepare(options, None)?;
        self.image.load(prepared.memory())?;
        note_return(&self.path, self.image.identity(), self.image.machine());
        prepared.start()
    }
}

#[derive(Debug)]
pub struct Running {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    workers: Vec<Worker>,
    /// Both serial ports, and orders.
    wires: Wires,
    rings: Vec<RawFd>,
    view: View,
    smaps: Option<Arc<fs::File>>,
    _vm: Arc<VmFd>,
}

impl Running {
    /// Returns a handle by which another thread can end the guest.
    #[must_use]
    pub fn handle(&self) -> Handle {
        Handle { shared: Arc::clone(&self.shared), view: self.view.clone(), smaps: self.smaps.clone() }
    }

    /// Gives up all rights of this process that the monitor needs no more. What the process does besides has
    /// to be done before.
    ///
    /// # Errors
    /// The host does not take the rights away.
    pub fn confine(&self) -> Result<()> {
        self.confinement().begin()
    }

    /// Returns the rights that the monitor needs on, for another thread that lets the process give up the
    /// others.
    #[must_use]
    pub fn confinement(&self) -> Confinement {
        let listeners = self.wires.iter().filter_map(|wire| wire.listener()).collect();
        Confinement { listeners, rings: self.rings.clone() }
    }

    /// Waits for the guest's end, and ends its processors and devices.
    #[must_use]
    pub fn wait(self) -> End {
        let end = {
            let mut platform = self.shared.platform();
            loop {
                if let Some(end) = platform.ended() {
                    break end.clone();
                }
                platform = self.shared.has_ended.wait(platform).unwrap_or_else(PoisonError::into_inner);
            }
        };
        for thread in self.threads {
            while !thread.is_finished() {
                // SAFETY: The thread is not joined yet. The signal only interrupts it.
                unsafe { libc::pthread_kill(thread.as_pthread_t(), libc::SIGUSR1) };
                thread::sleep(AGAIN);
            }
            let _ = thread.join();
        }
        let unsafe_disks: Vec<String> = self.workers.into_iter().filter_map(Worker::finish).collect();
        self.wires.iter().for_each(|wire| wire.finish(LAST_WORDS));
        terminal::restore();
        if unsafe_disks.is_empty() { end } else { End::Failed(unsafe_disks.join("; ")) }
    }
}

/// The rights that a monitor needs while its guest runs.
#[derive(Clone, Debug)]
pub struct Confinement {
    listeners: Vec<RawFd>,
    rings: Vec<RawFd>,
}

impl Confinement {
    /// Gives up all other rights of this process, as [`Running::confine`] does.
    ///
    /// # Errors
    /// The host does not take the rights away.
    pub fn begin(&self) -> Result<()> {
        sandbox::confine(&self.listeners, &self.rings)
    }
}

/// A handle on a guest that runs.
#[derive(Clone, Debug)]
pub struct Handle {
    shared: Arc<Shared>,
    view: View,
    smaps: Option<Arc<fs::File>>,
}

impl Handle {
    /// Returns true if the guest's kernel has woken up: it has found a device of the monitor, which it does
    /// when its own devices have gone on and before its applications do.
    #[must_use]
    pub fn is_awake(&self) -> bool {
        self.shared.platform().is_driven()
    }

    /// Returns true if the guest has ended.
    #[must_use]
    pub fn has_ended(&self) -> bool {
        self.shared.platform().ended().is_some()
    }

    pub fn stop(&self) {
        self.shared.end(End::Stopped);
    }

    /// Returns the memory of the host that the monitor takes beside the guest's, in bytes. `None` if the host
    /// does not say.
    #[must_use]
    pub fn own_memory(&self) -> Option<u64> {
        use vm_memory::{GuestMemoryBackend, GuestMemoryRegion};
        let guest: Vec<Range<u64>> = self
            .view
            .iter()
            .filter_map(|region| {
                let start =
                    mercury_devices::memory::pointer(&self.view, region.start_addr().0, region.len())?;
                let start = start.addr() as u64;
                Some(start..start + region.len())
            })
            .collect();
        let mut text = String::new();
        // It is read once, from its beginning. The file's length is not asked for: that is forbidden.
        self.smaps.as_deref()?.take(u64::MAX).read_to_string(&mut text).ok()?;
        Some(resident(&text, &guest))
    }
}

/// Adds up the resident memory of all mappings but some.
fn resident(smaps: &str, without: &[Range<u64>]) -> u64 {
    let mut is_counted = false;
    let mut bytes = 0;
    for line in smaps.lines() {
        let first = line.split_whitespace().next().unwrap_or_default();
        if let Some((start, end)) = first.split_once('-') {
            let number = |text| u64::from_str_radix(text, 16).unwrap_or(0);
            let (start, end) = (number(start), number(end));
            is_counted = !without.iter().any(|range| range.start < end && start < range.end);
        } else if first == "Rss:" && is_counted {
            let kib: u64 = line.split_whitespace().nth(1).and_then(|text| text.parse().ok()).unwrap_or(0);
            bytes += kib << 10;
        }
    }
    bytes
}

/// State that processors and devices share.
#[derive(Debug)]
struct Shared {
    platform: Mutex<Platform>,
    has_ended: Condvar,
    bell: Arc<Bell>,
    calls: Calls,
}

impl Shared {
    fn platform(&self) -> MutexGuard<'_, Platform> {
        self.platform.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn end(&self, end: End) {
        self.platform().end(end);
        self.has_ended.notify_all();
        self.bell.ring();
    }
}

/// KVM's interrupt controllers.
#[derive(Debug)]
struct Chip(Arc<VmFd>);

impl Lines for Chip {
    fn set(&self, line: u32, is_high: bool) {
        // It fails only for a line that no controller has.
        let _ = self.0.set_irq_line(line, is_high);
    }

    fn message(&self, address: u64, data: u32) {
        let (address_lo, address_hi) = (address as u32, (address >> 32) as u32);
        // It fails only for an address at which no processor has an interrupt controller.
        let _ = self.0.signal_msi(kvm_msi { address_lo, address_hi, data, ..kvm_msi::default() });
    }
}

/// Slots of the guest's memory.
struct Slots {
    vm: Arc<VmFd>,
    view: View,
}

impl WriteLog for Slots {
    fn switch(&self, is_on: bool) -> io::Result<()> {
        let flags = if is_on { KVM_MEM_LOG_DIRTY_PAGES } else { 0 };
        memory::give(&self.vm, &self.view, flags).map_err(|error| io::Error::other(error.message))
    }

    fn take(&self, slot: u32, bytes: usize) -> io::Result<Vec<u64>> {
        self.vm.get_dirty_log(slot, bytes).map_err(|error| io::Error::from_raw_os_error(error.errno()))
    }
}

/// Checks that this host can have guests at all.
///
/// # Errors
/// KVM is missing, or this user may not use it.
pub fn need_kvm() -> Result<()> {
    open_kvm().map(drop)
}

fn open_kvm() -> Result<Kvm> {
    Kvm::new().map_err(|error| no_kvm(error.errno()))
}

/// Returns the error of a host whose KVM cannot be opened.
fn no_kvm(errno: i32) -> Error {
    let why = io::Error::from_raw_os_error(errno);
    Error::new(Exit::Impossible, format!("cannot open {KVM}: {why}")).hint(match errno {
        libc::ENOENT | libc::ENODEV => {
            "load the module kvm_amd or kvm_intel, and switch virtualization on in the firmware's setup"
        }
        libc::EACCES | libc::EPERM => "join the group kvm, or use root",
        libc::EBUSY => "another hypervisor uses the processors' virtualization: end it (`mercury status`)",
        libc::EMFILE | libc::ENFILE | libc::ENOMEM => crate::SHORT_OF,
        _ => "the host's kernel log (`dmesg`) may have the reason",
    })
}

fn make_vm(kvm: &Kvm, view: &View) -> Result<VmFd> {
    let wrong = |what: &'static str| move |error: kvm_ioctls::Error| kvm_refused(what, error);
    let vm = kvm.create_vm().map_err(wrong("make a guest"))?;
    let pages = KVM_PAGES.start;
    vm.set_identity_map_address(pages).map_err(wrong("take a page for identical addresses"))?;
    vm.set_tss_address(pages as usize + 0x1000).map_err(wrong("take pages for a task"))?;
    vm.create_irq_chip().map_err(wrong("make interrupt controllers"))?;
    let timer = kvm_pit_config { flags: KVM_PIT_SPEAKER_DUMMY, ..kvm_pit_config::default() };
    vm.create_pit2(timer).map_err(wrong("make a timer"))?;
    memory::give(&vm, view, 0)?;
    Ok(vm)
}

/// Devices, and the descriptors of the rings that disks use.
type Opened = (Vec<Box<dyn Device>>, Vec<RawFd>);

fn open_devices(options: &Options, witness: Option<Witness>, waker: &Waker) -> Result<Opened> {
    let mut rings = Vec::new();
    let mut devices: Vec<Box<dyn Device>> = Vec::new();
    if let Some(net) = &options.net {
        let card = net.open().and_then(|open| open.start(Arc::clone(waker))).map_err(failed)?;
        devices.push(Box::new(card.witnessed(witness)));
    }
    for (disk, number) in options.disks.iter().zip(0_usize..) {
        let block = Block::open(&disk.path, disk.read_only).map_err(failed)?;
        let mut block = block.identified_as(&format!("mercury-guest-{number}"));
        // Without rings of the host's, requests are done one after the other.
        let _ = block.overlap(Arc::clone(waker));
        rings.extend(block.ring());
        devices.push(Box::new(block));
    }
    devices.push(Box::new(Rng));
    Ok((devices, rings))
}

pub(crate) fn failed(error: mercury_devices::error::Error) -> Error {
    let exit = if error.is_hosts() { Exit::Impossible } else { Exit::Failed };
    let plain = Error::new(exit, error.message());
    match error.remedy() {
        Some(hint) => plain.hint(hint),
        None => plain,
    }
}

fn open_wires(console: &Console, waker: &Waker, wires: &mut Wires) -> Result<[Arc<Wire>; 2]> {
    let (first, second) = match console {
        Console::Terminal { second } => (None, second),
        Console::Sockets { first, second } => (Some(first), second),
    };
    let second = wires.add(Wire::socket(second, Arc::clone(waker))?);
    let first = match first {
        Some(path) => Wire::socket(path, Arc::clone(waker))?,
        None => Wire::terminal(Arc::clone(waker))?,
    };
    Ok([wires.add(first), second])
}

/// Returns reserved memory of the firmware that the guest does not have, without PCI's configuration space.
fn unbacked(machine: &Machine, layout: &Layout, tables: &Tables) -> Vec<Range<u64>> {
    let reserved = machine.firmware.iter().filter(|range| range.kind != "System RAM");
    let reserved = reserved.map(|range| range.start_phys..range.last_phys.saturating_add(1));
    let touches = |one: &Range<u64>, other: &Range<u64>| one.start < other.end && other.start < one.end;
    // Registers of interrupt controllers are reserved as well; KVM has them.
    reserved
        .filter(|range| !layout.ranges().iter().any(|other| touches(range, other)))
        .filter(|range| !tables.configuration.iter().any(|other| touches(range, other)))
        .collect()
}

/// Writes the description of the virtio devices into the monitor's memory.
fn describe(view: &View, description: &GuestDescription) -> Result<()> {
    let mut bytes = Vec::new();
    bytes.extend(description.magic.to_le_bytes());
    bytes.extend(description.version.to_le_bytes());
    bytes.extend(description.count.to_le_bytes());
    for slot in &description.slots {
        bytes.extend(slot.window_phys.to_le_bytes());
        for word in [slot.window_bytes, slot.gsi, slot.device, slot.reserved] {
            bytes.extend(word.to_le_bytes());
        }
    }
    bytes.extend(description.doorbell_gsi.to_le_bytes());
    bytes.extend(description.reserved.to_le_bytes());
    debug_assert_eq!(bytes.len(), size_of::<GuestDescription>());
    write(view, MONITOR.start, &bytes).ok_or_else(|| Error::fault("the monitor's memory is missing"))
}

/// Returns the host's memory that is available, in bytes.
///
/// # Errors
/// The host does not say.
fn available_memory() -> Result<u64> {
    const FILE: &str = "/proc/meminfo";
    let wrong = |why: &str| {
        Error::new(Exit::Impossible, format!("cannot read {FILE}: {why}")).hint("mount proc on /proc")
    };
    let text = fs::read_to_string(FILE).map_err(|error| wrong(&error.to_string()))?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"));
    let kib = line.and_then(|line| line.trim().split(' ').next()?.parse::<u64>().ok());
    kib.map(|kib| kib << 10).ok_or_else(|| wrong("it does not say what is available"))
}

/// Starts the thread that takes events from outside.
fn listen(shared: &Arc<Shared>) -> Result<()> {
    let shared = Arc::clone(shared);
    let spawned = start_thread("devices", move || {
        loop {
            shared.bell.wait();
            let mut platform = shared.platform();
            platform.poll();
            if platform.ended().is_some() {
                shared.has_ended.notify_all();
                return;
            }
        }
    });
    spawned.map_err(|error| {
        let text = format!("cannot start a thread for devices: {error}");
        Error::new(Exit::Impossible, text).hint(crate::SHORT_OF)
    })
}

/// Lets a signal interrupt a processor, and do nothing else.
fn ignore_call() {
    extern "C" fn nothing(_: libc::c_int) {}
    // SAFETY: The handler does nothing, and stays. No flag asks for a restart of system calls.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = nothing as extern "C" fn(libc::c_int) as libc::sighandler_t;
        libc::sigaction(libc::SIGUSR1, &raw const action, std::ptr::null_mut());
    }
}

/// Starts the threads of all processors. None executes before all have started.
fn begin(processors: Vec<VcpuFd>, shared: &Arc<Shared>) -> Result<Vec<JoinHandle<()>>> {
    let gate = Arc::new(RwLock::new(false));
    let mut is_open = gate.write().unwrap_or_else(PoisonError::into_inner);
    let start = |(vcpu, number): (VcpuFd, u32)| {
        let (own, gate) = (Arc::clone(shared), Arc::clone(&gate));
        let run = move || {
            if *gate.read().unwrap_or_else(PoisonError::into_inner) {
                execute(vcpu, &own);
            }
        };
        spawn(&format!("cpu-{number}"), run).map_err(|error| {
            let text = format!("cannot start a processor: {error}");
            shared.end(End::Failed(text.clone()));
            Error::new(Exit::Impossible, text).hint(crate::SHORT_OF)
        })
    };
    let threads = processors.into_iter().zip(0_u32..).map(start).collect::<Result<_>>()?;
    *is_open = true;
    Ok(threads)
}

/// Executes a processor until the guest ends.
fn execute(mut vcpu: VcpuFd, shared: &Shared) {
    let mut answer = Code::UnknownOperation;
    loop {
        let exit = vcpu.run();
        match exit {
            Ok(VcpuExit::IoOut(port, data)) if let Some(number) = Calls::number(port) => {
                let Ok(page) = data.try_into().map(u32::from_le_bytes) else { continue };
                answer = shared.calls.call(number, page, &|virt| translate(&vcpu, virt));
                continue;
            }
            Ok(VcpuExit::IoIn(port, data)) if port == PORTS.start => {
                data.iter_mut().zip((answer as u32).to_le_bytes()).for_each(|(to, from)| *to = from);
                continue;
            }
            _ => {}
        }
        let mut platform = shared.platform();
        match exit {
            Ok(VcpuExit::IoIn(port, data)) => platform.read_port(port, data),
            Ok(VcpuExit::IoOut(port, data)) => platform.write_port(port, data),
            Ok(VcpuExit::MmioRead(phys, data)) => platform.read_memory(phys, data),
            Ok(VcpuExit::MmioWrite(phys, data)) => platform.write_memory(phys, data),
            Ok(VcpuExit::Intr | VcpuExit::Hlt) => {}
            Ok(VcpuExit::Shutdown) => platform.end(End::Failed("its kernel has faulted three times".into())),
            Ok(other) => platform.end(End::Failed(format!("KVM has stopped a processor: {other:?}"))),
            Err(error) if [libc::EINTR, libc::EAGAIN].contains(&error.errno()) => {}
            Err(error) => platform.end(End::Failed(format!("KVM does not run a processor: {error}"))),
        }
        if platform.ended().is_some() {
            shared.has_ended.notify_all();
            shared.bell.ring();
            return;
        }
    }
}

/// Returns the physical address of a virtual one, as the processor has it.
fn translate(vcpu: &VcpuFd, virt: u64) -> Option<u64> {
    vcpu.translate_gva(virt).ok().filter(|found| found.valid != 0).map(|found| found.physical_address)
}

#[cfg(test)]
mod tests {
    use super::*;
    use mercury_image::{FirmwareRange, Kind, Range as ImageRange};

    #[test]
    fn each_reason_against_kvm_has_a_remedy() {
        let errors = [libc::ENOENT, libc::EACCES, libc::EBUSY, libc::EMFILE, libc::EIO].map(no_kvm);
        assert!(errors.iter().all(|error| error.hint.is_some() && error.exit == Exit::Impossible));
        assert!(errors[3].hint.as_ref().is_some_and(|hint| hint.contains("ulimit")));
    }

    #[test]
    fn reserved_memory_reads_as_zeros_where_nobody_has_it() {
        let range =
            |start_phys, last_phys, kind: &str| FirmwareRange { start_phys, last_phys, kind: kind.into() };
        let machine = Machine {
            ranges: vec![ImageRange { start_phys: 0x10_0000, pages: 16, kind: Kind::Kept }],
            firmware: vec![
                range(0x10_0000, 0x10_FFFF, "System RAM"),
                range(0x11_0000, 0x11_0FFF, "Reserved"),
                range(0xB000_0000, 0xBFFF_FFFF, "Reserved"),
                range(0xA_0000, 0xA_0FFF, "Reserved"),
            ],
            ..Machine::default()
        };
        let layout = Layout::of(&machine).expect("a layout");
        let configuration = std::iter::once(0xB000_0000..0xC000_0000).collect();
        let tables = Tables { configuration, ..Tables::default() };
        let expected: Vec<Range<u64>> = std::iter::once(0x11_0000..0x11_1000).collect();
        assert_eq!(unbacked(&machine, &layout, &tables), expected);
    }

    /// A second life of these connections would use their counters again.
    #[test]
    fn a_return_is_noted_if_its_connections_go_on() {
        let folder = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).expect("a folder");
        let identity = Identity([7; 16]);
        for (ends_connections, expected) in [(None, true), (Some(false), true), (Some(true), false)] {
            let path = folder.path().join(format!("{ends_connections:?}"));
            let machine = Machine { ends_connections, ..Machine::default() };
            let file = fs::File::create(&path).expect("a file");
            let writer = mercury_image::Writer::begin(&file, identity, &machine).expect("begun");
            writer.commit().expect("committed");
            // Images have several records of a page and more.
            file.set_len(8192).expect("longer");
            let image = Image::open(&path).expect("an image");
            note_return(&path, image.identity(), image.machine());
            let first = fs::read(&path).expect("a file");
            let start = mercury_image::Start::read(&first).expect("an image");
            assert_eq!(start.was_restored, expected, "{ends_connections:?}");
        }
    }

    #[test]
    fn the_monitor_s_memory_is_all_but_the_guest_s() {
        let smaps = "1000-3000 rw-p 00000000 00:00 0\nSize: 8 kB\nRss: 8 kB\nVmFlags: rd\n\
                     7f00-9f00 rw-p 00000000 00:00 0\nRss: 100 kB\na000-b000 r-xp 0 0:0 1 /bin/x\nRss: \
                     4 kB\n";
        let guest: Vec<Range<u64>> = std::iter::once(0x7000..0x8000).collect();
        assert_eq!(resident(smaps, &guest), 12 << 10);
    }

    #[test]
    fn the_description_has_the_layout_that_the_driver_reads() {
        let view = View::from_ranges(&[(vm_memory::GuestAddress(MONITOR.start), 0x1000)]).expect("memory");
        let mut description =
            GuestDescription { magic: 1, version: 2, count: 3, ..GuestDescription::default() };
        description.slots[1].gsi = 7;
        describe(&view, &description).expect("described");
        let mut bytes = [0; size_of::<GuestDescription>()];
        mercury_devices::memory::read(&view, MONITOR.start, &mut bytes).expect("there");
        let gsi = std::mem::offset_of!(GuestDescription, slots) + 24 + 12;
        assert_eq!((bytes[0], bytes[8], bytes[12], bytes[gsi]), (1, 2, 3, 7));
    }
}
