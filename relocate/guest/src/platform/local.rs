//! Controllers of the machine's own disks: the registers that processors reach, and the thread that works
//! for each.

use super::{Lines, pci::place};
use crate::disks;
use mercury_control::{
    error::{Error, Result},
    exit::Exit,
};
use mercury_controllers::{
    Interrupts, Memory,
    nvme::{Controller, Registers},
    pci::{Effects, Function},
};
use mercury_devices::{
    Bell,
    memory::{self, View},
    signals::without_signals,
};
use std::{
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
};

/// Number of the base address register with a controller's registers.
const REGISTERS: usize = 0;

/// A controller as processors see it.
pub struct Local {
    /// Bus, device and function, as in an address.
    pub place: u32,
    function: Arc<Mutex<Function>>,
    registers: Arc<Registers>,
    bell: Arc<Bell>,
    lines: Arc<dyn Lines>,
}

/// The thread of a controller.
#[derive(Debug)]
pub struct Worker {
    address: String,
    bell: Arc<Bell>,
    ends: Arc<AtomicBool>,
    thread: JoinHandle<std::result::Result<(), String>>,
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
}

impl Interrupts for Vectors {
    fn raise(&self, vector: u16) {
        let message = lock(&self.function).raise(vector);
        if let Some(message) = message {
            self.lines.message(message.address, message.data);
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
    let disks::Controller { address, function, identity, namespaces, limits } = planned;
    let wrong =
        |why: &str| Error::new(Exit::Impossible, format!("cannot start the controller {address}: {why}"));
    let place = place(&address).ok_or_else(|| wrong("it is not in PCI's first domain"))?;
    let bell = Bell::new().map_err(|error| wrong(error.message()))?;
    let (function, bell) = (Arc::new(Mutex::new(function)), Arc::new(bell));
    let vectors = Vectors { function: Arc::clone(&function), lines: Arc::clone(lines) };
    let mut controller = Controller::new(identity, namespaces, limits, Ram(view.clone()), vectors);
    let registers = controller.registers();
    let ends = Arc::new(AtomicBool::new(false));
    let (rings, over) = (Arc::clone(&bell), Arc::clone(&ends));
    let work = move || {
        while !over.load(Ordering::Acquire) {
            rings.wait();
            controller.work();
        }
        controller.finish()
    };
    let thread = without_signals(|| thread::Builder::new().name("disk".into()).spawn(work));
    let thread = thread.map_err(|error| wrong(&error.to_string()))?;
    let worker = Worker { address: address.clone(), bell: Arc::clone(&bell), ends, thread };
    Ok((Local { place, function, registers, bell, lines: Arc::clone(lines) }, worker))
}

impl Worker {
    /// Ends the controller's work in order, after the processors' end. Returns the reason if a disk did not
    /// take its last writes.
    pub fn finish(self) -> Option<String> {
        self.ends.store(true, Ordering::Release);
        self.bell.ring();
        let result =
            self.thread.join().unwrap_or_else(|_| Err("its thread has failed: this is a bug".into()));
        result.err().map(|why| format!("the disks of the controller {} are not safe: {why}", self.address))
    }
}

impl Local {
    /// Reads the configuration space.
    pub fn read_configuration(&self, at: usize, data: &mut [u8]) {
        lock(&self.function).read(at, data);
    }

    /// Writes the configuration space.
    pub fn write_configuration(&self, at: usize, data: &[u8]) {
        let effects = lock(&self.function).write(at, data);
        self.follow(&effects);
    }

    fn follow(&self, effects: &Effects) {
        effects.messages.iter().for_each(|one| self.lines.message(one.address, one.data));
        if effects.resets {
            self.registers.reset();
            self.bell.ring();
        }
    }

    /// Reads registers in memory. Returns false if the address is not the controller's.
    pub fn read(&self, phys: u64, data: &mut [u8]) -> bool {
        let function = lock(&self.function);
        let Some((bar, offset)) = function.decode(phys) else { return false };
        if !function.read_table(bar, offset, data) {
            data.fill(0);
            if bar == REGISTERS {
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
        drop(function);
        match effects {
            Some(effects) => self.follow(&effects),
            None if bar == REGISTERS && self.registers.write(offset, data) => self.bell.ring(),
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
            thread::sleep(Duration::from_millis(1));
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
}
