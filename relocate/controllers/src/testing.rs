//! A guest's memory and a disk for tests.

use crate::{Disk, Interrupts, Memory};
use std::{
    io,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
};

/// Memory from address zero.
#[derive(Clone, Debug)]
pub struct Ram(Arc<Mutex<Vec<u8>>>);

impl Ram {
    pub fn new(bytes: usize) -> Self {
        Self(Arc::new(Mutex::new(vec![0; bytes])))
    }
}

fn place(at: u64, length: usize, whole: usize) -> Option<std::ops::Range<usize>> {
    let start = usize::try_from(at).ok()?;
    let end = start.checked_add(length)?;
    (end <= whole).then_some(start..end)
}

impl Memory for Ram {
    fn read(&self, at: u64, into: &mut [u8]) -> Option<()> {
        let all = self.0.lock().ok()?;
        into.copy_from_slice(&all[place(at, into.len(), all.len())?]);
        Some(())
    }

    fn write(&self, at: u64, bytes: &[u8]) -> Option<()> {
        let mut all = self.0.lock().ok()?;
        let place = place(at, bytes.len(), all.len())?;
        all[place].copy_from_slice(bytes);
        Some(())
    }
}

/// The vectors that were raised, and the level of the line.
#[derive(Clone, Debug, Default)]
pub struct Raised(pub Arc<Mutex<Vec<u16>>>, pub Arc<AtomicBool>);

impl Interrupts for Raised {
    fn raise(&self, vector: u16) {
        if let Ok(mut all) = self.0.lock() {
            all.push(vector);
        }
    }

    fn level(&self, is_high: bool) {
        self.1.store(is_high, Ordering::Relaxed);
    }
}

/// Content, what was done, and the error of each next operation.
#[derive(Debug, Default)]
pub struct Content {
    pub bytes: Vec<u8>,
    pub log: Vec<String>,
    pub fails: Option<i32>,
}

/// A disk in memory.
#[derive(Clone, Debug, Default)]
pub struct Fake(pub Arc<Mutex<Content>>, pub bool);

impl Fake {
    pub fn new(bytes: usize) -> Self {
        Self(Arc::new(Mutex::new(Content { bytes: vec![0; bytes], ..Content::default() })), false)
    }

    fn touch(&self, name: &str, at: u64, length: u64, change: impl FnOnce(&mut [u8])) -> io::Result<()> {
        let mut content = self.0.lock().map_err(|_| io::ErrorKind::Other)?;
        content.log.push(format!("{name} {at} {length}"));
        if let Some(number) = content.fails {
            return Err(io::Error::from_raw_os_error(number));
        }
        let whole = content.bytes.len();
        let place = place(at, usize::try_from(length).unwrap_or(usize::MAX), whole);
        change(&mut content.bytes[place.ok_or(io::ErrorKind::UnexpectedEof)?]);
        Ok(())
    }
}

impl Disk for Fake {
    fn is_read_only(&self) -> bool {
        self.1
    }

    fn read(&mut self, at: u64, into: &mut [u8]) -> io::Result<()> {
        self.touch("read", at, into.len() as u64, |bytes| into.copy_from_slice(bytes))
    }

    fn write(&mut self, at: u64, bytes: &[u8]) -> io::Result<()> {
        self.touch("write", at, bytes.len() as u64, |to| to.copy_from_slice(bytes))
    }

    fn flush(&mut self) -> io::Result<()> {
        self.touch("flush", 0, 0, |_| ())
    }

    fn zero(&mut self, at: u64, length: u64) -> io::Result<()> {
        self.touch("zero", at, length, |bytes| bytes.fill(0))
    }

    fn discard(&mut self, at: u64, length: u64) -> io::Result<()> {
        self.touch("discard", at, length, |_| ())
    }
}

/// A disk whose reads and writes say that they have begun, and wait until they may go on.
#[cfg(test)]
pub struct Held {
    disk: Fake,
    begun: std::sync::mpsc::Sender<()>,
    goes: std::sync::mpsc::Receiver<()>,
}

/// The other end of a [`Held`] disk.
#[cfg(test)]
pub struct Hold {
    pub begun: std::sync::mpsc::Receiver<()>,
    /// Lets all operations go on once it is dropped.
    pub goes: std::sync::mpsc::Sender<()>,
}

#[cfg(test)]
impl Held {
    pub fn new(disk: Fake) -> (Self, Hold) {
        let ((begins, begun), (go, goes)) = (std::sync::mpsc::channel(), std::sync::mpsc::channel());
        (Self { disk, begun: begins, goes }, Hold { begun, goes: go })
    }

    fn wait(&self) {
        let _ = self.begun.send(());
        let _ = self.goes.recv();
    }
}

#[cfg(test)]
impl Disk for Held {
    fn is_read_only(&self) -> bool {
        false
    }

    fn read(&mut self, at: u64, into: &mut [u8]) -> io::Result<()> {
        self.wait();
        self.disk.read(at, into)
    }

    fn write(&mut self, at: u64, bytes: &[u8]) -> io::Result<()> {
        self.wait();
        self.disk.write(at, bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.wait();
        self.disk.flush()
    }

    fn zero(&mut self, at: u64, length: u64) -> io::Result<()> {
        self.disk.zero(at, length)
    }

    fn discard(&mut self, at: u64, length: u64) -> io::Result<()> {
        self.disk.discard(at, length)
    }
}
