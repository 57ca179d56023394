//! Controllers of the machine's own disks: the registers that processors reach, and the thread that works
//! for each.

use super::{Lines, place};
use crate::disks::{self, Kind};
use mercury_control::{
    error::{Error, Result},
    exit::Exit,
};
use mercury_controllers::{
    Interrupts, Memory, ahci, nvme,
    pci::{Effects, Function},
};
use mercury_devices::{
    Bell,
    memory::{self, View},
    signals::{spawn, without_signals},
};
use std::{
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread::JoinHandle,
};

/// A controller as processors see it.
pub struct Local {
    /// Bus, device and function, as in an address.
    pub place: u32,
    /// Global system interrupt, if it does without messages.
    pub line: Option<u32>,
    function: Arc<Mutex<Function>>,
    /// Number of the base address register with the registers.
    bar: usize,
    registers: Arc<dyn Registers>,
    bell: Arc<Bell>,
    lines: Arc<dyn Lines>,
}

/// Registers of a controller, which never wait.
trait Registers: Send + Sync {
    fn read(&self, offset: u64, data: &mut [u8]);
    /// Returns true if the controller has work then.
    fn write(&self, offset: u64, data: &[u8]) -> bool;
    fn reset(&self);
    /// Follows Bus Master Enable.
    fn set_master(&self, is_master: bool);
    /// Follows a change of the configuration space.
    fn settle(&self) {}
}

impl Registers for nvme::Registers {
    fn read(&self, offset: u64, data: &mut [u8]) {
        self.read(offset, data);
    }

    fn write(&self, offset: u64, data: &[u8]) -> bool {
        self.write(offset, data)
    }

    fn reset(&self) {
        self.reset();
    }

    fn set_master(&self, is_master: bool) {
        self.set_master(is_master);
    }
}

impl<I: Interrupts + Send + Sync> Registers for ahci::Registers<I> {
    fn read(&self, offset: u64, data: &mut [u8]) {
        self.read(offset, data);
    }

    fn write(&self, offset: u64, data: &[u8]) -> bool {
        self.write(offset, data)
    }

    fn reset(&self) {
        self.reset();
    }

    fn set_master(&self, is_master: bool) {
        self.set_master(is_master);
    }

    fn settle(&self) {
        self.settle();
    }
}

/// The part of a controller that one thread owns.
trait Work: Send {
    fn work(&mut self);
    fn finish(&mut self) -> std::result::Result<(), String>;
}

impl<M: Memory + Send, I: Interrupts + Send> Work for nvme::Controller<M, I> {
    fn work(&mut self) {
        self.work();
    }

    fn finish(&mut self) -> std::result::Result<(), String> {
        self.finish()
    }
}

impl<M: Memory + Send, I: Interrupts + Send + Sync> Work for ahci::Controller<M, I> {
    fn work(&mut self) {
        self.work();
    }

    fn finish(&mut self) -> std::result::Result<(), String> {
        self.finish()
    }
}

/// The thread of a controller.
#[derive(Debug)]
pub struct Worker {
    address: String,
    bell: Arc<Bell>,
    ends: Arc<AtomicBool>,
    /// `None`: the controller has ended.
    thread: Option<JoinHandle<std::result::Result<(), String>>>,
}

impl std::fmt::Debug for Local {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Local").field("place", &self.place).finish_non_exhaustive()
    }
}

/// The guest's memory for a controller.
struct Ram(View);

impl Memory for Ram {
    fn read(&self, at: u64, into: &mut [u8]) -> Option<()> {
        memory::read(&self.0, at, into)
    }

    fn write(&self, at: u64, bytes: &[u8]) -> Option<()> {
        memory::write(&self.0, at, bytes)
    }
}

/// The way of a controller's interrupts.
struct Vectors {
    function: Arc<Mutex<Function>>,
    lines: Arc<dyn Lines>,
    /// True if all ports share the first entry of a table of messages, as Linux's driver has it on AHCI.
    shares_table: bool,
    line: Option<u32>,
    /// Level of the line, as the interrupt controllers have it.
    is_high: AtomicBool,
}

impl Interrupts for Vectors {
    fn raise(&self, vector: u16) {
        let mut function = lock(&self.function);
        let shares = self.shares_table && function.has_table();
        // The lock is held: a driver that has taken Bus Master Enable away gets no message after that.
        if let Some(message) = function.raise(if shares { 0 } else { vector }) {
            self.lines.message(message.address, message.data);
        }
    }

    fn level(&self, is_high: bool) {
        let Some(line) = self.line else { return };
        let is_high = is_high && lock(&self.function).uses_line();
        if self.is_high.swap(is_high, Ordering::AcqRel) != is_high {
            self.lines.set(line, is_high);
        }
    }
}

fn lock(function: &Mutex<Function>) -> MutexGuard<'_, Function> {
    function.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Starts a controller.
///
/// # Errors
/// It has a place that no processor reaches, or the host has no room for a thread.
pub fn start(planned: disks::Controller, view: &View, lines: &Arc<dyn Lines>) -> Result<(Local, Worker)> {
    let disks::Controller { address, function, kind } = planned;
    let wrong = |why: &str| {
        Error::new(Exit::Impossible, format!("cannot start the controller {address}: {why}"))
            .hint("leave this disk's --disk out, or give the host room for one more thread")
    };
    let place = place(&address).ok_or_else(|| wrong("it is not in PCI's first domain"))?;
    let bell = Bell::new().map_err(|error| wrong(error.message()))?;
    let (function, bell) = (Arc::new(Mutex::new(function)), Arc::new(bell));
    let line = if let Kind::Ahci { line, .. } = kind { line } else { None };
    let vectors = Vectors {
        function: Arc::clone(&function),
        lines: Arc::clone(lines),
        shares_table: matches!(kind, Kind::Ahci { .. }),
        line,
        is_high: AtomicBool::new(false),
    };
    let (mut controller, registers, bar) = make(kind, Ram(view.clone()), vectors);
    registers.set_master(lock(&function).is_master());
    let ends = Arc::new(AtomicBool::new(false));
    let (rings, over) = (Arc::clone(&bell), Arc::clone(&ends));
    let work = move || {
        while !over.load(Ordering::Acquire) {
            rings.wait();
            controller.work();
        }
        controller.finish()
    };
    let thread = without_signals(|| spawn("disk", work));
    let thread = thread.map_err(|error| wrong(&error.to_string()))?;
    let worker = Worker { address: address.clone(), bell: Arc::clone(&bell), ends, thread: Some(thread) };
    Ok((Local { place, line, function, bar, registers, bell, lines: Arc::clone(lines) }, worker))
}

/// Makes a controller. Returns its registers too, and the number of their base address register.
fn make(kind: Kind, ram: Ram, vectors: Vectors) -> (Box<dyn Work>, Arc<dyn Registers>, usize) {
    match kind {
        Kind::Nvme { identity, namespaces, limits } => {
            let controller = nvme::Controller::new(identity, namespaces, limits, ram, vectors);
            let registers = controller.registers();
            (Box::new(controller), registers, disks::nvme::REGISTERS)
        }
        Kind::Ahci { properties, drives, .. } => {
            let controller = ahci::Controller::new(properties, drives, ram, vectors);
            let registers = controller.registers();
            (Box::new(controller), registers, disks::ahci::REGISTERS)
        }
    }
}

impl Worker {
    /// Ends the controller's work in order, after the processors' end. Returns the reason if a disk did not
    /// take its last writes.
    pub fn finish(mut self) -> Option<String> {
        let why = self.end().err()?;
        Some(format!("the disks of the controller {} are not safe: {why}", self.address))
    }

    fn end(&mut self) -> std::result::Result<(), String> {
        let Some(thread) = self.thread.take() else { return Ok(()) };
        self.ends.store(true, Ordering::Release);
        self.bell.ring();
        thread.join().unwrap_or_else(|_| Err("its thread has failed: this is a bug".into()))
    }
}

/// Ends the controller of a guest that has not begun: no disk has been written to.
impl Drop for Worker {
    fn drop(&mut self) {
        let _ = self.end();
    }
}

impl Local {
    /// Reads the configuration space.
    pub fn read_configuration(&self, at: usize, data: &mut [u8]) {
        lock(&self.function).read(at, data);
    }

    /// Writes the configuration space.
    pub fn write_configuration(&self, at: usize, data: &[u8]) {
        let mut function = lock(&self.function);
        let effects = function.write(at, data);
        // The last write of two processors decides.
        self.registers.set_master(function.is_master());
        self.send(&effects);
        drop(function);
        self.follow(&effects);
    }

    /// Sends messages that have waited, before another processor can take Bus Master Enable away.
    fn send(&self, effects: &Effects) {
        effects.messages.iter().for_each(|one| self.lines.message(one.address, one.data));
    }

    fn follow(&self, effects: &Effects) {
        if effects.resets {
            self.registers.reset();
            self.bell.ring();
        }
        // Messages or the line may be on or off now.
        self.registers.settle();
    }

    /// Reads registers in memory. Returns false if the address is not the controller's.
    pub fn read(&self, phys: u64, data: &mut [u8]) -> bool {
        let function = lock(&self.function);
        let Some((bar, offset)) = function.decode(phys) else { return false };
        if !function.read_table(bar, offset, data) {
            data.fill(0);
            if bar == self.bar {
                self.registers.read(offset, data);
            }
        }
        true
    }

    /// Writes registers in memory. Returns false if the address is not the controller's.
    pub fn write(&self, phys: u64, data: &[u8]) -> bool {
        let mut function = lock(&self.function);
        let Some((bar, offset)) = function.decode(phys) else { return false };
        let effects = function.write_table(bar, offset, data);
        effects.iter().for_each(|effects| self.send(effects));
        drop(function);
        match effects {
            Some(effects) => self.follow(&effects),
            None if bar == self.bar && self.registers.write(offset, data) => self.bell.ring(),
            None => {}
        }
        true
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::disks::tests::{START, planned};
    use std::time::{Duration, Instant};
    use vm_memory::GuestAddress;

    const BASE: u64 = START as u64;
    const QUEUES: [u64; 2] = [0x1000, 0x2000];
    const DATA: u64 = 0x4000;

    #[derive(Default)]
    struct Sent(Mutex<Vec<(u64, u32)>>);

    impl Lines for Sent {
        fn set(&self, _: u32, _: bool) {}

        fn message(&self, address: u64, data: u32) {
            self.0.lock().unwrap().push((address, data));
        }
    }

    fn wait_for(mut is_done: impl FnMut() -> bool) {
        let start = Instant::now();
        while !is_done() {
            assert!(start.elapsed() < Duration::from_secs(20), "nothing comes");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// A driver switches the controller on, and asks it who it is.
    #[test]
    fn a_controller_works_on_a_thread_of_its_own_and_sends_its_message() {
        let view = View::from_ranges(&[(GuestAddress(0), 0x1_0000)]).unwrap();
        let sent = Arc::new(Sent::default());
        let lines: Arc<dyn Lines> = sent.clone();
        let (_file, controller) = planned();
        let (local, worker) = start(controller, &view, &lines).unwrap();
        assert_eq!(local.place, 1 << 16);
        let mut register = [0; 4];
        local.read_configuration(0x10, &mut register);
        assert_eq!(u32::from_le_bytes(register), START | 4);
        let write = |offset: u64, value: u32| assert!(local.write(BASE + offset, &value.to_le_bytes()));
        let read = |offset: u64| {
            let mut bytes = [0; 4];
            assert!(local.read(BASE + offset, &mut bytes));
            u32::from_le_bytes(bytes)
        };
        assert!(!local.read(BASE - 4, &mut [0; 4]) && !local.write(BASE + 0x4000, &[0; 4]));
        // The first message, and all of them on.
        write(0x2000, 0xFEE0_0000);
        write(0x2008, 0x41);
        write(0x200C, 0);
        local.write_configuration(0x42, &[7, 0x80]);
        write(0x24, 3 | 3 << 16);
        write(0x28, QUEUES[0] as u32);
        write(0x30, QUEUES[1] as u32);
        write(0x14, 1);
        wait_for(|| read(0x1C) == 1);
        let mut command = [0_u8; 64];
        (command[0], command[2], command[25], command[40]) = (6, 9, (DATA >> 8) as u8, 1);
        memory::write(&view, QUEUES[0], &command).unwrap();
        write(0x1000, 1);
        wait_for(|| !sent.0.lock().unwrap().is_empty());
        assert_eq!(*sent.0.lock().unwrap(), [(0xFEE0_0000, 0x41)]);
        let mut model = [0; 5];
        memory::read(&view, DATA + 24, &mut model).unwrap();
        assert_eq!(&model, b"MODEL");
        assert_eq!(worker.finish(), None);
    }

    /// A driver takes Bus Master Enable away, and a command that it asks for afterwards reads no memory.
    #[test]
    fn a_controller_that_is_no_master_reaches_no_memory() {
        let view = View::from_ranges(&[(GuestAddress(0), 0x1_0000)]).unwrap();
        let lines: Arc<dyn Lines> = Arc::new(Sent::default());
        let (_file, controller) = planned();
        let (local, worker) = start(controller, &view, &lines).unwrap();
        let write = |offset: u64, value: u32| assert!(local.write(BASE + offset, &value.to_le_bytes()));
        let status = || {
            let mut bytes = [0; 4];
            assert!(local.read(BASE + 0x1C, &mut bytes));
            u32::from_le_bytes(bytes)
        };
        write(0x24, 3 | 3 << 16);
        write(0x28, QUEUES[0] as u32);
        write(0x30, QUEUES[1] as u32);
        write(0x14, 1);
        wait_for(|| status() == 1);
        local.write_configuration(4, &[2, 0]);
        let mut command = [0_u8; 64];
        (command[0], command[25], command[40]) = (6, (DATA >> 8) as u8, 1);
        memory::write(&view, QUEUES[0], &command).unwrap();
        write(0x1000, 1);
        wait_for(|| status() == 2);
        let mut model = [1; 5];
        memory::read(&view, DATA + 24, &mut model).unwrap();
        assert_eq!(model, [0; 5]);
        local.write_configuration(4, &[6, 0]);
        write(0x14, 0);
        wait_for(|| status() == 0);
        write(0x14, 1);
        wait_for(|| status() == 1);
        write(0x1000, 1);
        wait_for(|| memory::read(&view, DATA + 24, &mut model).is_some() && &model == b"MODEL");
        assert_eq!(worker.finish(), None);
    }

    /// A vector is raised while Bus Master Enable is off: its message is sent when the driver sets the bit.
    #[test]
    fn a_message_waits_for_bus_master_enable() {
        let (_file, controller) = planned();
        let function = Arc::new(Mutex::new(controller.function));
        let sent = Arc::new(Sent::default());
        let lines: Arc<dyn Lines> = sent.clone();
        let vectors = Vectors {
            function: Arc::clone(&function),
            lines,
            shares_table: false,
            line: None,
            is_high: AtomicBool::new(false),
        };
        {
            let mut function = lock(&function);
            for (at, word) in [(0, 0xFEE0_0000_u32), (8, 0x41), (12, 0)] {
                function.write_table(0, 0x2000 + at, &word.to_le_bytes()).unwrap();
            }
            function.write(0x42, &[7, 0x80]);
            function.write(4, &[2, 0]);
        }
        vectors.raise(0);
        assert_eq!(*sent.0.lock().unwrap(), []);
        let effects = lock(&function).write(4, &[6, 0]);
        assert_eq!(effects.messages.len(), 1);
        vectors.raise(0);
        assert_eq!(*sent.0.lock().unwrap(), [(0xFEE0_0000, 0x41)]);
    }

    /// A guest that does not start leaves no thread, and its disk is free again.
    #[test]
    fn a_controller_that_is_dropped_lets_go_of_its_disk() {
        let view = View::from_ranges(&[(GuestAddress(0), 0x1_0000)]).unwrap();
        let lines: Arc<dyn Lines> = Arc::new(Sent::default());
        let (file, controller) = planned();
        let (local, worker) = start(controller, &view, &lines).unwrap();
        assert!(mercury_devices::open_disk(file.path(), false).is_err(), "the disk is in use");
        let ends = Arc::downgrade(&worker.ends);
        drop(local);
        drop(worker);
        assert!(ends.upgrade().is_none(), "the thread is left");
        mercury_devices::open_disk(file.path(), false).unwrap();
    }

    #[derive(Default)]
    struct Levels(Mutex<Vec<(u32, bool)>>);

    impl Lines for Levels {
        fn set(&self, line: u32, is_high: bool) {
            self.0.lock().unwrap().push((line, is_high));
        }

        fn message(&self, _: u64, _: u32) {
            panic!("the driver has enabled no messages");
        }
    }

    /// A driver without messages starts a port, and asks its disk for the mode of power.
    #[test]
    fn a_controller_without_messages_holds_its_line_until_the_driver_has_answered() {
        use crate::disks::ahci::tests as sata;
        let view = View::from_ranges(&[(GuestAddress(0), 0x1_0000)]).unwrap();
        let levels = Arc::new(Levels::default());
        let lines: Arc<dyn Lines> = levels.clone();
        let (_file, controller) = sata::planned(19);
        let (local, worker) = start(controller, &view, &lines).unwrap();
        assert_eq!((local.place, local.line), (0x1F << 11 | 2 << 8, Some(19)));
        let at = |offset: u64| u64::from(sata::START) + offset;
        let write = |offset: u64, value: u32| assert!(local.write(at(offset), &value.to_le_bytes()));
        let read = |offset: u64| {
            let mut bytes = [0; 4];
            assert!(local.read(at(offset), &mut bytes));
            u32::from_le_bytes(bytes)
        };
        memory::write(&view, 0x1000, &[5, 0, 0, 0, 0, 0, 0, 0, 0, 0x20]).unwrap();
        memory::write(&view, 0x2000, &[0x27, 0x80, 0xE5]).unwrap();
        write(4, 1);
        wait_for(|| read(4) & 1 == 0);
        for (offset, value) in [(4, 2), (0x100, 0x1000), (0x108, 0x3000), (0x118, 0x11), (0x114, 1)] {
            write(offset, value);
        }
        wait_for(|| read(0x120) == 0x150);
        write(0x138, 1);
        wait_for(|| !levels.0.lock().unwrap().is_empty());
        write(0x110, 1);
        write(8, 1);
        assert_eq!(*levels.0.lock().unwrap(), [(19, true), (19, false)]);
        // The line is disabled while an interrupt is pending.
        write(0x138, 1);
        wait_for(|| levels.0.lock().unwrap().len() == 3);
        local.write_configuration(4, &[6, 4]);
        assert_eq!(levels.0.lock().unwrap().last(), Some(&(19, false)));
        local.write_configuration(4, &[6, 0]);
        assert_eq!(levels.0.lock().unwrap().last(), Some(&(19, true)));
        assert_eq!(worker.finish(), None);
    }
}
