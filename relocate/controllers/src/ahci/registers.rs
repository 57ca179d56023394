//! The controller's registers, which processors read and write at any time.

use crate::{Interrupts, gate::Gate};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Largest number of ports.
pub const PORTS_MAX: usize = 32;
/// Place of the first port's registers.
pub const FIRST_PORT: u64 = 0x100;
/// Size of a port's registers.
pub const PORT: u64 = 0x80;

/// Offsets of registers of the controller.
mod offset {
    pub const CAPABILITIES: u64 = 0x00;
    pub const CONTROL: u64 = 0x04;
    pub const INTERRUPTS: u64 = 0x08;
    pub const IMPLEMENTED: u64 = 0x0C;
    pub const VERSION: u64 = 0x10;
    pub const MORE_CAPABILITIES: u64 = 0x24;
}
/// Offsets of registers of a port.
mod port {
    pub const LIST: u64 = 0x00;
    pub const LIST_HIGH: u64 = 0x04;
    pub const RECEIVED: u64 = 0x08;
    pub const RECEIVED_HIGH: u64 = 0x0C;
    pub const STATUS: u64 = 0x10;
    pub const ENABLE: u64 = 0x14;
    pub const COMMAND: u64 = 0x18;
    pub const TASK_FILE: u64 = 0x20;
    pub const SIGNATURE: u64 = 0x24;
    pub const LINK: u64 = 0x28;
    pub const LINK_CONTROL: u64 = 0x2C;
    pub const LINK_ERROR: u64 = 0x30;
    pub const ACTIVE: u64 = 0x34;
    pub const ISSUE: u64 = 0x38;
}
/// Bits of the capabilities: addresses of 64 bits; AHCI alone.
const HAS_64_BITS: u32 = 1 << 31;
const IS_AHCI_ALONE: u32 = 1 << 18;

/// Bits of the control.
mod control {
    pub const RESET: u32 = 1;
    pub const INTERRUPTS: u32 = 2;
    pub const AHCI: u32 = 1 << 31;
}

/// Bits of a port's command.
pub mod command {
    pub const START: u32 = 1;
    pub const OVERRIDE: u32 = 1 << 3;
    pub const RECEIVES: u32 = 1 << 4;
    pub const IS_RECEIVING: u32 = 1 << 14;
    pub const IS_RUNNING: u32 = 1 << 15;
    /// What the firmware says about the port.
    pub const FIXED: u32 = 0x007C_0000;
    /// Start, spin-up, power, receive, and power management of the link.
    pub const WRITABLE: u32 = 0x0F02_0017;
}

/// Bits of a port's interrupt status.
pub mod status {
    pub const REGISTERS: u32 = 1;
    pub const PIO: u32 = 1 << 1;
    pub const BITS: u32 = 1 << 3;
    pub const CONNECT: u32 = 1 << 6;
    pub const READY: u32 = 1 << 22;
    pub const OVERFLOW: u32 = 1 << 24;
    pub const INTERFACE: u32 = 1 << 27;
    pub const BUS: u32 = 1 << 29;
    pub const TASK_FILE: u32 = 1 << 30;
}
/// Bits of a link's errors: the state of its signal has changed; a device was connected.
const SIGNAL: u32 = 1 << 16;
const CONNECTED: u32 = 1 << 26;
/// Bits of the task file: busy; busy or with data. The status of a port without a disk.
pub const BUSY: u32 = 0x80;
const BUSY_OR_DATA: u32 = 0x88;
const NO_DISK: u32 = 0x7F;
/// The signature of a disk, and of nothing.
const DISK: u32 = 0x0000_0101;
const NOTHING: u32 = 0xFFFF_FFFF;

/// What a controller has.
#[derive(Clone, Debug, Default)]
pub struct Properties {
    /// The register of capabilities.
    pub capabilities: u32,
    /// The register of more capabilities.
    pub more: u32,
    /// The register of the version.
    pub version: u32,
    /// Ports, each with what the firmware says in its command.
    pub ports: Vec<u32>,
}

/// Registers of a port.
#[derive(Clone, Debug, Default)]
pub struct Port {
    /// Generation of the disk's link. Zero: there is no disk.
    speed: u32,
    fixed: u32,
    pub list: u64,
    pub received: u64,
    status: u32,
    enable: u32,
    pub command: u32,
    pub task_file: u32,
    signature: u32,
    link_control: u32,
    link_error: u32,
    pub active: u32,
    pub issue: u32,
    /// True until the disk has sent its signature.
    pub owes_signature: bool,
    /// True while the disk is in a reset by its control register.
    pub is_in_reset: bool,
    /// True from a failure until the driver stops the port.
    pub is_halted: bool,
    /// True while a command is executed.
    pub is_at_work: bool,
    /// Number of stops and resets. A command that was begun before them ends without a trace.
    pub age: u64,
    /// Is shut with each of them.
    pub gate: Arc<Gate>,
}

/// Values of the registers.
#[derive(Clone, Debug)]
pub struct Values {
    properties: Properties,
    control: u32,
    interrupts: u32,
    implemented: u32,
    /// Ports whose interrupts were not raised yet.
    unraised: u32,
    pub ports: Vec<Port>,
}

/// The registers, and the way of interrupts.
#[derive(Debug)]
pub struct Registers<I> {
    values: Mutex<Values>,
    /// Held while interrupts are raised, so that the last level of the line is the right one.
    order: Mutex<()>,
    interrupts: I,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<I: Interrupts> Registers<I> {
    /// Makes the registers. The generation of the link of each port with a disk is given.
    pub fn new(mut properties: Properties, speeds: &[(usize, u32)], interrupts: I) -> Self {
        properties.ports.truncate(PORTS_MAX);
        let fixed = properties.ports.iter().map(|bits| bits & command::FIXED);
        let mut ports: Vec<_> = fixed.map(|fixed| Port { fixed, ..Port::default() }).collect();
        for (number, speed) in speeds {
            if let Some(port) = ports.get_mut(*number) {
                port.speed = (*speed).clamp(1, 3);
            }
        }
        let implemented = if ports.len() == PORTS_MAX { !0 } else { (1 << ports.len()) - 1 };
        let mut values = Values { properties, control: 0, interrupts: 0, implemented, unraised: 0, ports };
        values.reset();
        Self { values: Mutex::new(values), order: Mutex::new(()), interrupts }
    }

    /// Returns the values, until the guard is dropped. [`Registers::settle`] follows a change.
    pub fn values(&self) -> MutexGuard<'_, Values> {
        lock(&self.values)
    }

    /// Resets the controller, as a reset of its function does.
    pub fn reset(&self) {
        self.values().ask_for_reset();
    }

    /// Follows Bus Master Enable of the function.
    pub fn set_master(&self, is_master: bool) {
        self.values().ports.iter().for_each(|port| port.gate.set_master(is_master));
    }

    /// Raises the interrupts that the values stand for.
    pub fn settle(&self) {
        let _order = lock(&self.order);
        let (is_high, mut unraised) = self.values().take_interrupts();
        while unraised != 0 {
            self.interrupts.raise(unraised.trailing_zeros() as u16);
            unraised &= unraised - 1;
        }
        self.interrupts.level(is_high);
    }

    /// Reads registers.
    pub fn read(&self, offset: u64, data: &mut [u8]) {
        let values = self.values();
        for (byte, at) in data.iter_mut().zip(offset..) {
            *byte = values.read(at & !3).to_le_bytes()[(at & 3) as usize];
        }
    }

    /// Writes a register of four bytes, or two of them. Returns true if the controller has work then.
    pub fn write(&self, offset: u64, data: &[u8]) -> bool {
        if !offset.is_multiple_of(4) {
            return false;
        }
        let words = data.chunks_exact(4).map(|word| u32::from_le_bytes([word[0], word[1], word[2], word[3]]));
        let mut works = false;
        for (word, at) in words.take(2).zip((offset..).step_by(4)) {
            works |= self.values().write(at, word);
        }
        self.settle();
        works
    }
}

impl Values {
    /// Returns true if the driver has asked for a reset.
    pub fn wants_reset(&self) -> bool {
        self.control & control::RESET != 0
    }

    /// Asks for a reset. Commands that were begun reach the guest's memory no more, however long they hang.
    fn ask_for_reset(&mut self) {
        self.control |= control::RESET;
        self.ports.iter_mut().for_each(Port::grow);
    }

    /// Resets everything but what the firmware has set.
    pub fn reset(&mut self) {
        self.control = if self.is_ahci_alone() { control::AHCI } else { 0 };
        (self.interrupts, self.unraised) = (0, 0);
        self.ports.iter_mut().for_each(Port::reset);
    }

    fn is_ahci_alone(&self) -> bool {
        self.properties.capabilities & IS_AHCI_ALONE != 0
    }

    /// Returns the level of the line, and takes the ports whose messages are to be sent.
    fn take_interrupts(&mut self) -> (bool, u32) {
        let is_enabled = self.control & control::INTERRUPTS != 0;
        let unraised = std::mem::take(&mut self.unraised);
        (is_enabled && self.interrupts != 0, if is_enabled { unraised } else { 0 })
    }

    /// Notes events of a port.
    pub fn note(&mut self, number: usize, events: u32) {
        let Some(port) = self.ports.get_mut(number) else { return };
        port.status |= events;
        self.follow(number);
    }

    /// Lets a port's interrupt follow its status.
    fn follow(&mut self, number: usize) {
        if self.ports[number].status() & self.ports[number].enable != 0 {
            self.interrupts |= 1 << number;
            self.unraised |= 1 << number;
        }
    }

    fn read(&self, offset: u64) -> u32 {
        if let Some((number, register)) = self.port(offset) {
            return self.ports[number].read(register);
        }
        match offset {
            offset::CAPABILITIES => self.properties.capabilities,
            offset::CONTROL => self.control,
            offset::INTERRUPTS => self.interrupts,
            offset::IMPLEMENTED => self.implemented,
            offset::VERSION => self.properties.version,
            offset::MORE_CAPABILITIES => self.properties.more,
            _ => 0,
        }
    }

    fn port(&self, offset: u64) -> Option<(usize, u64)> {
        let offset = offset.checked_sub(FIRST_PORT)?;
        let number = usize::try_from(offset / PORT).ok().filter(|number| *number < self.ports.len())?;
        Some((number, offset % PORT))
    }

    fn write(&mut self, offset: u64, value: u32) -> bool {
        if let Some((number, register)) = self.port(offset) {
            let is_wide = self.properties.capabilities & HAS_64_BITS != 0;
            let works = self.ports[number].write(register, value, is_wide);
            if matches!(register, port::STATUS | port::ENABLE | port::LINK_CONTROL) {
                self.follow(number);
            }
            return works;
        }
        match offset {
            offset::CONTROL => self.write_control(value),
            offset::INTERRUPTS => {
                self.interrupts &= !value;
                // What has come meanwhile is raised again.
                (0..self.ports.len()).for_each(|number| self.follow(number));
                self.unraised |= self.interrupts;
            }
            // The firmware writes it once after a reset, and so does Linux's driver.
            offset::IMPLEMENTED => self.implemented = value,
            _ => {}
        }
        self.wants_reset()
    }

    fn write_control(&mut self, value: u32) {
        let kept = control::RESET | if self.is_ahci_alone() { control::AHCI } else { 0 };
        let old = self.control;
        self.control = old & kept | value & (control::RESET | control::INTERRUPTS | control::AHCI);
        if self.control & !old & control::RESET != 0 {
            self.ask_for_reset();
        }
        if self.control & !old & control::INTERRUPTS != 0 {
            self.unraised |= self.interrupts;
        }
    }
}

impl Port {
    fn reset(&mut self) {
        self.grow();
        let (speed, fixed, is_at_work, age) = (self.speed, self.fixed, self.is_at_work, self.age);
        let gate = Arc::clone(&self.gate);
        *self = Self { speed, fixed, is_at_work, age, gate, signature: NOTHING, ..Self::default() };
        self.task_file = NO_DISK;
        self.connect();
    }

    /// Ends the commands that were begun without a trace.
    fn grow(&mut self) {
        self.age += 1;
        self.gate.shut();
    }

    /// Returns true if the link to a disk is up.
    pub fn is_linked(&self) -> bool {
        self.speed > 0 && self.link_control & 0xF == 0
    }

    /// Lets the disk begin anew, if the link is up.
    fn connect(&mut self) {
        if self.is_linked() {
            self.owes_signature = true;
            self.task_file = BUSY;
        }
    }

    /// Returns the events, with those that the link's errors stand for.
    fn status(&self) -> u32 {
        let of = |error: u32, event: u32| if self.link_error & error != 0 { event } else { 0 };
        self.status | of(CONNECTED, status::CONNECT) | of(SIGNAL, status::READY)
    }

    /// Notes that the disk is there, whose signature the driver has.
    pub fn sign(&mut self, status: u8, error: u8) {
        self.owes_signature = false;
        self.signature = DISK;
        self.task_file = u32::from(error) << 8 | u32::from(status);
    }

    fn read(&self, register: u64) -> u32 {
        match register {
            port::LIST => self.list as u32,
            port::LIST_HIGH => (self.list >> 32) as u32,
            port::RECEIVED => self.received as u32,
            port::RECEIVED_HIGH => (self.received >> 32) as u32,
            port::STATUS => self.status(),
            port::ENABLE => self.enable,
            port::COMMAND => self.read_command(),
            port::TASK_FILE => self.task_file,
            port::SIGNATURE => self.signature,
            port::LINK => self.link(),
            port::LINK_CONTROL => self.link_control,
            port::LINK_ERROR => self.link_error,
            port::ACTIVE => self.active,
            port::ISSUE => self.issue,
            _ => 0,
        }
    }

    fn read_command(&self) -> u32 {
        let is = |yes: bool, bit: u32| if yes || self.is_at_work { bit } else { 0 };
        self.command
            | self.fixed
            | is(self.command & command::START != 0, command::IS_RUNNING)
            | is(self.command & command::RECEIVES != 0, command::IS_RECEIVING)
    }

    /// Returns the state of the link: active, at the fastest speed that both ends allow.
    fn link(&self) -> u32 {
        if self.link_control & 0xF == 4 {
            return 4;
        }
        let most = self.link_control >> 4 & 0xF;
        let speed = if most == 0 { self.speed } else { self.speed.min(most) };
        if self.is_linked() { 0x103 | speed << 4 } else { 0 }
    }

    /// Writes a register. Returns true if the controller has work then.
    fn write(&mut self, register: u64, value: u32, is_wide: bool) -> bool {
        let low = |old: u64, mask: u32| old & !0xFFFF_FFFF | u64::from(value & mask);
        let high = |old: u64| old & 0xFFFF_FFFF | if is_wide { u64::from(value) << 32 } else { 0 };
        match register {
            port::LIST => self.list = low(self.list, !0x3FF),
            port::LIST_HIGH => self.list = high(self.list),
            port::RECEIVED => self.received = low(self.received, !0xFF),
            port::RECEIVED_HIGH => self.received = high(self.received),
            port::STATUS => self.status &= !value,
            port::ENABLE => self.enable = value,
            port::COMMAND => self.write_command(value),
            port::LINK_CONTROL => self.write_link(value),
            port::LINK_ERROR => self.link_error &= !value,
            port::ACTIVE if self.is_started() => self.active |= value,
            port::ISSUE if self.is_started() => self.issue |= value,
            _ => {}
        }
        matches!(register, port::COMMAND | port::LINK_CONTROL | port::ISSUE)
    }

    pub fn is_started(&self) -> bool {
        self.command & command::START != 0
    }

    fn write_command(&mut self, value: u32) {
        if value & command::OVERRIDE != 0 {
            self.task_file &= !BUSY_OR_DATA;
        }
        let was_started = self.is_started();
        self.command = value & command::WRITABLE;
        if was_started && !self.is_started() {
            (self.active, self.issue, self.is_halted) = (0, 0, false);
            self.grow();
        }
    }

    /// Follows the driver, which cuts the link and lets it come up again.
    fn write_link(&mut self, value: u32) {
        let was_linked = self.is_linked();
        self.link_control = value & 0xFFF;
        match (was_linked, self.is_linked()) {
            (true, false) => {
                self.grow();
                (self.active, self.issue) = (0, 0);
                (self.owes_signature, self.is_in_reset) = (false, false);
                (self.task_file, self.signature) = (NO_DISK, NOTHING);
                self.link_error |= SIGNAL;
            }
            (false, true) => {
                self.link_error |= SIGNAL | CONNECTED;
                self.connect();
            }
            _ => {}
        }
    }
}
