//! The devices of a small PC by their ports: interrupt controllers, timer, clock, serial port.
//! Devices of virtio have registers in memory. The crate `mercury-devices` has those that another monitor
//! uses as well.

pub(crate) mod console;
mod pic;
mod pit;

use std::{
    io, ptr,
    sync::{Arc, atomic::Ordering},
    time::{Duration, Instant},
};

pub use console::{Console, Log};
use mercury_devices::{
    Agent, Balloon, Gate, Pmem, Rng, Size,
    clock::Clock,
    memory::View,
    serial::Serial,
    signals::Waker,
    state::{Reader, Writer},
    virtio::{Device, Transport, WINDOW},
};
pub use mercury_devices::{Block, JoinedSubnet, Net, NetOption, OpenUplink, SubnetCard, SubnetOption};
use vm_memory::{GuestAddress, GuestRegionMmap, MmapRegion};

use crate::{
    error::{Error, Result},
    machine::End,
    memory::Memory,
};
use pic::Pics;
use pit::Pit;

const TIMER_LINE: u8 = 0;
const SERIAL: u16 = 0x3F8;
const SERIAL_LINE: u8 = 4;
/// Lines for disks, which nothing else of a PC has.
const DISK_LINES: [u8; 6] = [5, 7, 9, 10, 11, 12];
/// The interrupt line of the network card: the second disk controller's.
const NET_LINE: u8 = 15;
/// The interrupt line of the card on a subnet: the first disk controller's.
const SUBNET_LINE: u8 = 14;
/// The interrupt line of the source of randomness: the second serial port's.
const RNG_LINE: u8 = 3;
/// The interrupt line of the device that takes unused memory back: the floppy drive's.
const BALLOON_LINE: u8 = 6;
/// The interrupt line of the port to the guest's agent: the numeric processor's.
const AGENT_LINE: u8 = 13;
/// The time in which an agent makes a copy of another machine a machine of its own.
const AGENT_AT_MOST: Duration = Duration::from_secs(20);
/// The keyboard controller's command that pulls the processor's reset line.
const RESET: (u16, u8) = (0x64, 0xFE);

/// The devices of a machine.
#[derive(Debug)]
pub struct Devices {
    pub console: Console,
    pics: Pics,
    pit: Pit,
    clock: Clock,
    serial: Serial,
    alarm: Alarm,
    ended: Option<End>,
    slots: Vec<(Transport, u8)>,
    balloon: &'static Size,
    gate: Arc<Gate>,
    /// The time at which the gate is opened without the agent.
    gate_opens: Option<u64>,
    /// True if the machine begins as a copy of another one.
    is_copy: bool,
    view: View,
    window: u64,
}

/// Virtio's devices, and the lines by which they interrupt.
#[derive(Debug)]
pub struct Slots {
    devices: Vec<(Box<dyn Device>, u8)>,
    balloon: &'static Size,
    gate: Arc<Gate>,
    is_copy: bool,
}

impl Slots {
    /// Disks in their order, those in memory after the others, a network card, a card on a subnet, a source
    /// of randomness, a balloon, a port to an agent.
    ///
    /// # Errors
    /// If there are too many disks.
    pub fn new(
        disks: Vec<Block>,
        memory: Vec<Pmem>,
        net: Option<Net>,
        subnet: Option<SubnetCard>,
        balloon: &'static Size,
        agent: Agent,
    ) -> Result<Self> {
        if disks.len() + memory.len() > DISK_LINES.len() {
            return Err(Error::new(format!("a machine has {} disks at most", DISK_LINES.len()))
                .hint("leave disks out, or put two on one as partitions"));
        }
        let mut slots: Vec<(Box<dyn Device>, u8)> = Vec::new();
        let disks = disks.into_iter().map(|disk| Box::new(disk) as Box<dyn Device>);
        let memory = memory.into_iter().map(|disk| Box::new(disk) as Box<dyn Device>);
        slots.extend(disks.chain(memory).zip(DISK_LINES));
        slots.extend(net.map(|net| (Box::new(net) as _, NET_LINE)));
        slots.extend(subnet.map(|card| (Box::new(card) as _, SUBNET_LINE)));
        slots.push((Box::new(Rng), RNG_LINE));
        slots.push((Box::new(Balloon::new(balloon)), BALLOON_LINE));
        let (gate, is_copy) = (agent.gate(), agent.is_copy());
        slots.push((Box::new(agent), AGENT_LINE));
        Ok(Self { devices: slots, balloon, gate, is_copy })
    }

    /// Returns the kernel's options that describe the devices.
    #[must_use]
    pub fn describe(&self, memory: &Memory) -> String {
        let words = self.devices.iter().enumerate().map(|(number, (_, line))| {
            let at = window(memory) + number as u64 * WINDOW;
            format!(" virtio_mmio.device={WINDOW}@{at:#x}:{line}:{number}")
        });
        words.collect()
    }
}

impl Devices {
    /// Makes them; from now on the calling thread gets signals for them.
    ///
    /// # Errors
    /// If the host refuses a timer.
    pub fn new(console: Console, memory: &Memory, slots: Slots) -> Result<Self> {
        let Slots { devices, balloon, gate, is_copy } = slots;
        let slots = devices.into_iter().map(|(device, line)| Ok((Transport::new(device)?, line)));
        Ok(Self {
            slots: slots.collect::<Result<_>>()?,
            balloon,
            gate,
            gate_opens: None,
            is_copy,
            view: view(memory)?,
            window: window(memory),
            console,
            pics: Pics::default(),
            pit: Pit::default(),
            clock: Clock::default(),
            serial: Serial::default(),
            alarm: Alarm::new()?,
            ended: None,
        })
    }

    /// Reads a register in memory. `None` if there is no device.
    #[must_use]
    pub fn read_memory(&self, physical: u64, size: usize) -> Option<u64> {
        let offset = physical.checked_sub(self.window)?;
        let (transport, _) = self.slots.get((offset / WINDOW) as usize)?;
        Some(transport.read(offset % WINDOW, size))
    }

    /// Writes a register in memory. `None` if there is no device.
    pub fn write_memory(&mut self, physical: u64, value: u64) -> Option<()> {
        let offset = physical.checked_sub(self.window)?;
        let (transport, line) = self.slots.get_mut((offset / WINDOW) as usize)?;
        let was_shut = self.gate.is_shut();
        if was_shut && is_network(*line) && Transport::is_notice(offset % WINDOW) {
            // The card is polled when the gate opens.
            return Some(());
        }
        if transport.write(offset % WINDOW, value, &self.view) {
            self.pics.raise(*line);
        }
        if was_shut && !self.gate.is_shut() {
            self.poll();
        }
        Some(())
    }

    /// Asks the guest for so many pages, all in all.
    pub fn set_balloon(&mut self, pages: u32) {
        self.balloon.wanted.store(pages, Ordering::Relaxed);
        self.poll();
    }

    /// Ends the requests that the host has. The guest stands still, so there are no new ones. Returns false
    /// if the host has not answered all of them in time.
    #[must_use]
    pub fn drain(&mut self, at_most: Duration) -> bool {
        let begin = Instant::now();
        self.console.flush();
        self.poll();
        while !self.slots.iter().all(|(transport, _)| transport.is_idle()) {
            if begin.elapsed() > at_most {
                return false;
            }
            std::thread::yield_now();
            self.poll();
        }
        true
    }

    /// Writes the devices' state, with what was typed and not read.
    pub fn save(&self, to: &mut Writer) {
        self.pics.save(to);
        self.pit.save(to, now());
        to.number(self.clock.index());
        self.serial.save(to);
        to.bytes(&self.console.typed());
        to.number(self.slots.len() as u64);
        self.slots.iter().for_each(|(transport, _)| transport.save(to));
    }

    /// Takes the state of devices like these.
    ///
    /// # Errors
    /// If it is that of others.
    pub fn load(&mut self, from: &mut Reader<'_>) -> Result<()> {
        self.pics = Pics::load(from)?;
        self.pit = Pit::load(from, now())?;
        self.clock = Clock::showing(from.number()?);
        self.serial = Serial::load(from)?;
        self.console.type_again(from.bytes()?);
        if from.number::<usize>()? != self.slots.len() {
            return Err(Error::new("the saved machine had another number of devices")
                .hint("give it the disks that it had, in the same order"));
        }
        self.slots.iter_mut().try_for_each(|(transport, _)| transport.load(from))?;
        let is_on_subnet = self.slots.iter().any(|(_, line)| *line == SUBNET_LINE);
        if self.is_copy && is_on_subnet && !self.gate.is_shut() {
            return Err(Error::new(
                "the saved machine has no agent that would give this copy an address on its subnet",
            )
            .hint("start mercury-agent in the machine before you save it"));
        }
        self.gate_opens = self.gate.is_shut().then(|| now() + AGENT_AT_MOST.as_nanos() as u64);
        self.set_alarm();
        Ok(())
    }

    /// Takes events from outside.
    pub fn poll(&mut self) {
        if self.pit.expired(now()) {
            self.pics.raise(TIMER_LINE);
        }
        self.open_late_gate();
        self.set_alarm();
        self.receive_typed();
        if self.console.was_ended() {
            self.ended = Some(End::Ended);
        }
        self.raise_serial();
        let is_shut = self.gate.is_shut();
        for (transport, line) in self.slots.iter_mut().filter(|(_, line)| !is_shut || !is_network(*line)) {
            if transport.poll(&self.view) {
                self.pics.raise(*line);
            }
        }
    }

    /// Lets the outside reach a machine whose agent does not answer.
    fn open_late_gate(&mut self) {
        if !self.gate.is_shut() {
            self.gate_opens = None;
        } else if self.gate_opens.is_some_and(|time| time <= now()) {
            eprintln!(
                "mercury hosted: the agent has not answered in {} s, so this copy is reached as it is",
                AGENT_AT_MOST.as_secs()
            );
            self.gate.open();
        }
    }

    fn receive_typed(&mut self) {
        let room = self.serial.room();
        if room > 0 && !self.gate.is_shut() {
            let typed = self.console.take(room);
            self.serial.receive(&typed);
        }
    }

    fn raise_serial(&mut self) {
        if self.serial.wants_attention() {
            self.pics.raise(SERIAL_LINE);
        }
    }

    fn set_alarm(&mut self) {
        if let Some(when) = self.pit.next().into_iter().chain(self.gate_opens).min() {
            self.alarm.set(when);
        }
    }

    /// Returns true if an interrupt waits.
    #[must_use]
    pub fn has_interrupt(&self) -> bool {
        self.pics.has_interrupt()
    }

    /// Returns the vector of the interrupt that is delivered now.
    pub fn acknowledge(&mut self) -> Option<u8> {
        self.pics.acknowledge()
    }

    /// Returns the machine's end, if it has come.
    #[must_use]
    pub fn ended(&self) -> Option<End> {
        self.ended
    }

    pub fn read(&mut self, port: u16, size: usize) -> u32 {
        let byte = match port {
            0x20 | 0x21 | 0xA0 | 0xA1 => self.pics.read(port),
            0x40..=0x43 => self.pit.read(port, now()),
            0x61 => 0x20,
            0x64 => 0,
            0x70 | 0x71 => self.clock.read(port),
            0x3F8..=0x3FF => {
                let byte = self.serial.read((port - SERIAL) as u8);
                self.receive_typed();
                self.raise_serial();
                byte
            }
            _ => return u32::MAX >> (32 - 8 * size.clamp(1, 4)),
        };
        byte.into()
    }

    pub fn write(&mut self, port: u16, size: usize, value: u32) {
        let byte = value as u8;
        match port {
            _ if size != 1 => {}
            0x20 | 0x21 | 0xA0 | 0xA1 => self.pics.write(port, byte),
            0x40..=0x43 => {
                self.pit.write(port, byte, now());
                self.set_alarm();
            }
            0x70 | 0x71 => self.clock.write(port, byte),
            0x3F8..=0x3FF => {
                let sent = self.serial.write((port - SERIAL) as u8, byte);
                self.console.put(&sent);
                self.receive_typed();
                self.raise_serial();
            }
            _ if (port, byte) == RESET => self.ended = Some(End::Reset),
            _ => {}
        }
    }
}

/// Returns true if a network card has this interrupt line.
fn is_network(line: u8) -> bool {
    [NET_LINE, SUBNET_LINE].contains(&line)
}

/// Returns the address of devices' registers: a gigabyte after memory.
fn window(memory: &Memory) -> u64 {
    const GIB: u64 = 1 << 30;
    memory.size().next_multiple_of(GIB) + GIB
}

/// Returns the guest's memory as devices see it.
fn view(memory: &Memory) -> Result<View> {
    let wrong = |what: &str| Error::bug(format!("cannot give devices the guest's memory: {what}"));
    let start = memory.pointer(0, memory.size()).ok_or_else(|| wrong("there is none"))?;
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: The guest's memory is mapped there for as long as the process lives.
    let region =
        unsafe { MmapRegion::build_raw(start, memory.size() as usize, protection, libc::MAP_SHARED) };
    let region = region.map_err(|error| wrong(&error.to_string()))?;
    let region = GuestRegionMmap::new(region, GuestAddress(0)).ok_or_else(|| wrong("its size"))?;
    View::from_regions(vec![region]).map_err(|error| wrong(&error.to_string()))
}

/// Returns a waker that sends the calling thread SIGUSR1.
#[must_use]
pub fn signal_waker() -> Waker {
    // SAFETY: It takes nothing.
    let (process, listener) = unsafe { (libc::getpid(), libc::gettid()) };
    // SAFETY: The thread lives as long as the process.
    Arc::new(move || unsafe {
        libc::syscall(libc::SYS_tgkill, process, listener, libc::SIGUSR1);
    })
}

/// Nanoseconds of the host's clock that never goes back.
#[must_use]
pub fn now() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: It is given room for the answer.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut time) };
    time.tv_sec.cast_unsigned() * 1_000_000_000 + time.tv_nsec.cast_unsigned()
}

/// A timer of the host's that sends this thread SIGALRM.
#[derive(Debug)]
pub struct Alarm {
    timer: libc::timer_t,
    set_for: u64,
}

impl Alarm {
    /// One that is not set.
    ///
    /// # Errors
    /// If the host refuses.
    pub fn new() -> Result<Self> {
        let mut timer = ptr::null_mut();
        // SAFETY: All zeros are a valid event, of which the fields are set that this kind has.
        let made = unsafe {
            let mut event: libc::sigevent = std::mem::zeroed();
            event.sigev_notify = libc::SIGEV_THREAD_ID;
            event.sigev_signo = libc::SIGALRM;
            event.sigev_notify_thread_id = libc::gettid();
            libc::timer_create(libc::CLOCK_MONOTONIC, &raw mut event, &raw mut timer)
        };
        if made != 0 {
            let error = io::Error::last_os_error();
            return Err(crate::error::Error::new(format!("cannot make a timer: {error}"))
                .hint("the host limits your timers: raise ulimit -i"));
        }
        Ok(Self { timer, set_for: 0 })
    }

    /// Sets it to a time of [`now`].
    pub fn set(&mut self, when: u64) {
        if when == self.set_for {
            return;
        }
        self.set_for = when;
        let value = libc::timespec {
            tv_sec: (when / 1_000_000_000).cast_signed(),
            tv_nsec: (when % 1_000_000_000).cast_signed(),
        };
        let none = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        let setting = libc::itimerspec { it_interval: none, it_value: value };
        // SAFETY: The timer was made by `new`.
        unsafe { libc::timer_settime(self.timer, libc::TIMER_ABSTIME, &raw const setting, ptr::null_mut()) };
    }
}
