//! The doorbell by which the host orders a command in the guest, and what the command answers. A socket leads
//! to the operator's command on the host.

use crate::{layout::MONITOR, wires::Wire};
use mercury_abi::guest::{MERCURY_GUEST_ORDER, MERCURY_GUEST_ORDER_MAX};
use mercury_devices::memory::{View, write};
use std::sync::Arc;

const MOST: usize = MERCURY_GUEST_ORDER_MAX as usize;

/// The doorbell. `line` is its interrupt, if one was free.
#[derive(Debug)]
pub struct Doorbell {
    wire: Arc<Wire>,
    pub line: Option<u32>,
    order: Vec<u8>,
    /// The client whose order it is.
    client: u64,
}

impl Doorbell {
    pub fn new(wire: Arc<Wire>, line: Option<u32>) -> Self {
        Self { wire, line, order: Vec::new(), client: 0 }
    }

    /// Takes what has come of an order. Returns the interrupt to be raised when it is complete: an empty
    /// string ends it.
    pub fn take(&mut self, view: &View) -> Option<u32> {
        let (client, bytes) = self.wire.take_of_client(MOST - self.order.len());
        if std::mem::replace(&mut self.client, client) != client {
            self.order.clear();
        }
        self.order.extend(bytes);
        let Some(end) = self.order.windows(2).position(|pair| pair == [0, 0]) else {
            if self.order.len() == MOST {
                self.order.clear();
                self.refuse("the order is too long");
            }
            return None;
        };
        self.order.truncate(end);
        self.order.resize(MOST, 0);
        write(view, MONITOR.start + u64::from(MERCURY_GUEST_ORDER), &self.order)?;
        self.order.clear();
        if self.line.is_none() {
            self.refuse("no interrupt is free for an order");
        }
        self.line
    }

    /// Passes on what the guest answers.
    pub fn answer(&self, data: &[u8]) {
        match data.try_into().map(i32::from_le_bytes) {
            Ok(error) => {
                let why = std::io::Error::from_raw_os_error(error);
                self.refuse(&format!("the guest's kernel cannot start /usr/sbin/mercury: {why}"));
            }
            Err(_) => self.wire.send(data),
        }
    }

    fn refuse(&self, why: &str) {
        self.wire.send(format!("{{\"error\":{{\"message\":\"{why}\"}}}}\n").as_bytes());
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use mercury_devices::memory::read;
    use std::{
        io::Write,
        os::unix::net::UnixStream,
        time::{Duration, Instant},
    };
    use vm_memory::GuestAddress;

    const ORDER: u64 = MONITOR.start + MERCURY_GUEST_ORDER as u64;

    fn doorbell(line: Option<u32>) -> (Doorbell, Arc<Wire>, View) {
        let wire = Arc::new(Wire::loose());
        let view = View::from_ranges(&[(GuestAddress(MONITOR.start), 0x1000)]).unwrap();
        (Doorbell::new(Arc::clone(&wire), line), wire, view)
    }

    #[test]
    fn an_order_comes_whole_and_rings_once() {
        let (mut doorbell, wire, view) = doorbell(Some(7));
        wire.receive(b"KEY=x\0migr");
        assert_eq!(doorbell.take(&view), None);
        wire.receive(b"ate\0there\0\0");
        assert_eq!((doorbell.take(&view), doorbell.take(&view)), (Some(7), None));
        let mut found = [1; 24];
        read(&view, ORDER, &mut found).unwrap();
        assert_eq!(&found, b"KEY=x\0migrate\0there\0\0\0\0\0");
        // A shorter one leaves nothing of the one before.
        wire.receive(b"A=b\0status\0\0");
        assert_eq!(doorbell.take(&view), Some(7));
        read(&view, ORDER, &mut found).unwrap();
        assert_eq!(&found[..14], b"A=b\0status\0\0\0\0");
        assert_eq!(wire.sent(), b"");
    }

    /// A client that goes in the middle of its order leaves nothing for the next one.
    #[test]
    fn an_order_is_of_one_client() {
        let (mut doorbell, _, view) = doorbell(Some(7));
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("orders.sock");
        let wire = Wire::private_socket(&path, Arc::new(|| {})).unwrap();
        doorbell.wire = Arc::clone(&wire);
        let patience = Instant::now() + Duration::from_secs(20);
        for (order, rings) in [(b"KEY=x\0mig".as_slice(), false), (b"A=b\0status\0\0", true)] {
            let mut client = UnixStream::connect(&path).unwrap();
            client.write_all(order).unwrap();
            let before = doorbell.order.len();
            let mut rang = None;
            while rang.is_none() && (rings || doorbell.order.len() == before) {
                rang = doorbell.take(&view);
                assert!(Instant::now() < patience, "nothing comes");
            }
            assert_eq!(rang, rings.then_some(7));
        }
        let mut found = [1; 14];
        read(&view, ORDER, &mut found).unwrap();
        assert_eq!(&found, b"A=b\0status\0\0\0\0");
    }

    #[test]
    fn an_order_without_end_and_one_that_nobody_hears_are_refused() {
        let (mut doorbell, wire, view) = doorbell(None);
        wire.receive(&[b'x'; MOST + 5]);
        assert_eq!(doorbell.take(&view), None);
        wire.receive(b"\0\0");
        assert_eq!(doorbell.take(&view), None);
        let said = String::from_utf8(wire.sent()).unwrap();
        assert!(said.contains("too long") && said.contains("no interrupt is free"), "{said}");
        doorbell.answer(&2_i32.to_le_bytes());
        doorbell.answer(b"x");
        let said = String::from_utf8(wire.sent()).unwrap();
        assert!(said.contains("No such file") && said.ends_with("}\nx"), "{said}");
    }
}
