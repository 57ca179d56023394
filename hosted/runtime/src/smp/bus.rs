//! The way to devices: the first processor has them, the others ask it.

use std::{
    hint,
    sync::atomic::{AtomicU32, AtomicU64, Ordering},
};

use super::Processor;
use crate::{
    devices::Devices,
    machine::End,
    process::{wait, wake},
};

/// The number of checks for the answer before the processor sleeps.
const SPINS: u32 = 2000;

/// A question of a processor, and the answer.
#[repr(C)]
#[derive(Debug)]
pub struct Mailbox {
    stage: AtomicU32,
    what: AtomicU32,
    address: AtomicU64,
    size: AtomicU64,
    value: AtomicU64,
}

mod stage {
    pub const EMPTY: u32 = 0;
    pub const ASKED: u32 = 1;
    pub const ANSWERED: u32 = 2;
    pub const REFUSED: u32 = 3;
}

mod what {
    pub const IN: u32 = 0;
    pub const OUT: u32 = 1;
    pub const READ: u32 = 2;
    pub const WRITE: u32 = 3;
}

/// Devices, or the way to them.
#[derive(Debug)]
pub enum Bus {
    /// The devices are in this process.
    Own(Box<Devices>),
    /// The first processor has them.
    Other(Processor),
    /// Another process has them, which does what takes them ([`crate::process::per_space`]).
    Absent,
}

impl Bus {
    /// Returns the devices, if they are in this process.
    pub fn own(&mut self) -> Option<&mut Devices> {
        match self {
            Self::Own(devices) => Some(devices),
            Self::Other(_) | Self::Absent => None,
        }
    }

    pub fn read(&mut self, port: u16, size: usize) -> u32 {
        match self {
            Self::Own(devices) => devices.read(port, size),
            Self::Other(one) => one.ask(what::IN, port.into(), size, 0).unwrap_or(0) as u32,
            Self::Absent => u32::MAX,
        }
    }

    pub fn write(&mut self, port: u16, size: usize, value: u32) {
        match self {
            Self::Own(devices) => devices.write(port, size, value),
            Self::Other(one) => {
                one.ask(what::OUT, port.into(), size, value.into());
            }
            Self::Absent => {}
        }
    }

    /// Reads a register in memory. `None` if there is no device.
    #[must_use]
    pub fn read_memory(&self, physical: u64, size: usize) -> Option<u64> {
        match self {
            Self::Own(devices) => devices.read_memory(physical, size),
            Self::Other(one) => one.ask(what::READ, physical, size, 0),
            Self::Absent => None,
        }
    }

    /// Writes a register in memory. `None` if there is no device.
    pub fn write_memory(&mut self, physical: u64, value: u64) -> Option<()> {
        match self {
            Self::Own(devices) => devices.write_memory(physical, value),
            Self::Other(one) => one.ask(what::WRITE, physical, 0, value).map(|_| ()),
            Self::Absent => None,
        }
    }

    /// Takes events from outside.
    pub fn poll(&mut self) {
        if let Some(devices) = self.own() {
            devices.poll();
        }
    }

    /// Returns true if an interrupt waits.
    #[must_use]
    pub fn has_interrupt(&self) -> bool {
        matches!(self, Self::Own(devices) if devices.has_interrupt())
    }

    /// Returns the vector of the interrupt that is delivered now.
    pub fn acknowledge(&mut self) -> Option<u8> {
        self.own().and_then(Devices::acknowledge)
    }

    /// Returns the machine's end, if it has come.
    #[must_use]
    pub fn ended(&self) -> Option<End> {
        match self {
            Self::Own(devices) => devices.ended(),
            Self::Other(_) | Self::Absent => None,
        }
    }

    /// Shows what the guest has sent.
    pub fn flush(&mut self) {
        if let Some(devices) = self.own() {
            devices.console.flush();
        }
    }

    /// Gives the terminal back as it was.
    pub fn restore(&mut self) {
        if let Some(devices) = self.own() {
            devices.console.restore();
        }
    }

    /// Does what the other processors ask for.
    pub fn serve(&mut self, first: &Processor) {
        let Self::Own(devices) = self else { return };
        for number in 1..first.count {
            let asked = &first.cpu(number).question;
            if asked.stage.load(Ordering::Acquire) != stage::ASKED {
                continue;
            }
            let (address, size) =
                (asked.address.load(Ordering::Relaxed), asked.size.load(Ordering::Relaxed) as usize);
            let value = asked.value.load(Ordering::Relaxed);
            let answer = match asked.what.load(Ordering::Relaxed) {
                what::IN => Some(devices.read(address as u16, size).into()),
                what::OUT => {
                    devices.write(address as u16, size, value as u32);
                    Some(0)
                }
                what::READ => devices.read_memory(address, size),
                _ => devices.write_memory(address, value).map(|()| 0),
            };
            asked.value.store(answer.unwrap_or(0), Ordering::Relaxed);
            let stage = if answer.is_some() { stage::ANSWERED } else { stage::REFUSED };
            asked.stage.store(stage, Ordering::Release);
            wake(&asked.stage);
        }
    }
}

impl Processor {
    /// Asks the first one, and waits for the answer.
    fn ask(&self, what: u32, address: u64, size: usize, value: u64) -> Option<u64> {
        let question = &self.own().question;
        question.what.store(what, Ordering::Relaxed);
        question.address.store(address, Ordering::Relaxed);
        question.size.store(size as u64, Ordering::Relaxed);
        question.value.store(value, Ordering::Relaxed);
        question.stage.store(stage::ASKED, Ordering::Release);
        self.call(0);
        let mut spins = 0;
        loop {
            match question.stage.load(Ordering::Acquire) {
                stage::ASKED if spins < SPINS => {
                    spins += 1;
                    hint::spin_loop();
                }
                stage::ASKED => wait(&question.stage, stage::ASKED),
                answered => {
                    question.stage.store(stage::EMPTY, Ordering::Relaxed);
                    let value = question.value.load(Ordering::Relaxed);
                    return (answered == stage::ANSWERED).then_some(value);
                }
            }
        }
    }
}
