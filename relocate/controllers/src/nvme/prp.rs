//! The places of a command's data in the guest's memory: pages, in the command or in lists (PRP).

use super::command::Status;
use crate::Memory;

/// Size of a page of the guest's, the only one that the controller has.
pub const PAGE: u64 = 4096;

/// Data of a command in the guest's memory, from the first byte to the last.
#[derive(Debug)]
pub struct Data<'a, M: ?Sized> {
    memory: &'a M,
    /// Address and length of each part.
    parts: Vec<(u64, u64)>,
    /// The current part, and the bytes of it that are done.
    at: usize,
    done: u64,
}

impl<'a, M: Memory + ?Sized> Data<'a, M> {
    /// Finds data of this length.
    ///
    /// # Errors
    /// A pointer leads nowhere, or has an offset that it may not have.
    pub fn find(memory: &'a M, pages: [u64; 2], length: u64) -> Result<Self, Status> {
        let mut data = Self { memory, parts: Vec::new(), at: 0, done: 0 };
        let [first, second] = pages;
        if !first.is_multiple_of(4) {
            return Err(Status::INVALID_PAGE_OFFSET);
        }
        let mut rest = length - data.add(first, (PAGE - first % PAGE).min(length));
        match rest {
            0 => {}
            1..=PAGE => {
                data.add_page(second, rest)?;
            }
            _ => data.follow(second, &mut rest)?,
        }
        Ok(data)
    }

    /// Adds a part, or makes the last one longer. Returns its length.
    fn add(&mut self, start: u64, length: u64) -> u64 {
        match self.parts.last_mut() {
            Some((last, bytes)) if last.checked_add(*bytes) == Some(start) => *bytes += length,
            _ => self.parts.push((start, length)),
        }
        length
    }

    fn add_page(&mut self, start: u64, rest: u64) -> Result<u64, Status> {
        if !start.is_multiple_of(PAGE) {
            return Err(Status::INVALID_PAGE_OFFSET);
        }
        Ok(self.add(start, rest.min(PAGE)))
    }

    /// Adds the pages of a list. Its last entry leads to another list if there are more pages.
    fn follow(&mut self, mut list: u64, rest: &mut u64) -> Result<(), Status> {
        while *rest > 0 {
            if !list.is_multiple_of(8) {
                return Err(Status::INVALID_PAGE_OFFSET);
            }
            let room = (PAGE - list % PAGE) / 8;
            let pages = rest.div_ceil(PAGE);
            // A list of one entry that leads to another one could lead to itself.
            if room == 1 && pages > 1 {
                return Err(Status::INVALID_FIELD);
            }
            let count = room.min(pages) as usize;
            let mut bytes = vec![0; count * 8];
            self.memory.read(list, &mut bytes).ok_or(Status::DATA_TRANSFER)?;
            let entries = bytes.as_chunks::<8>().0.iter().map(|bytes| u64::from_le_bytes(*bytes));
            for (entry, number) in entries.zip(1..) {
                if number == room && *rest > PAGE {
                    list = entry;
                } else {
                    *rest -= self.add_page(entry, *rest)?;
                }
            }
        }
        Ok(())
    }

    /// Copies the next bytes out of the guest's memory.
    ///
    /// # Errors
    /// A part of them is no memory, or there are no more.
    pub fn read(&mut self, into: &mut [u8]) -> Result<(), Status> {
        let memory = self.memory;
        self.each(into.len(), |place, range| memory.read(place, &mut into[range]))
    }

    /// Copies the next bytes into the guest's memory.
    ///
    /// # Errors
    /// A part of them is no memory, or there are no more.
    pub fn write(&mut self, bytes: &[u8]) -> Result<(), Status> {
        let memory = self.memory;
        self.each(bytes.len(), |place, range| memory.write(place, &bytes[range]))
    }

    fn each(
        &mut self,
        length: usize,
        mut copy: impl FnMut(u64, std::ops::Range<usize>) -> Option<()>,
    ) -> Result<(), Status> {
        let mut copied = 0;
        while copied < length {
            let (start, bytes) = *self.parts.get(self.at).ok_or(Status::DATA_TRANSFER)?;
            let count = (bytes - self.done).min((length - copied) as u64);
            let place = start.checked_add(self.done).ok_or(Status::DATA_TRANSFER)?;
            copy(place, copied..copied + count as usize).ok_or(Status::DATA_TRANSFER)?;
            copied += count as usize;
            self.done += count;
            if self.done == bytes {
                (self.at, self.done) = (self.at + 1, 0);
            }
        }
        Ok(())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::testing::Ram;
    use proptest::prelude::*;

    #[test]
    fn data_in_one_page_in_two_and_in_lists_of_lists() {
        let ram = Ram::new(4 << 20);
        let parts = |pages, length| Data::find(&ram, pages, length).map(|data| data.parts);
        assert_eq!(parts([0x1F00, 9], 256), Ok(vec![(0x1F00, 256)]));
        assert_eq!(parts([0x1F00, 0x2000], 512), Ok(vec![(0x1F00, 512)]));
        assert_eq!(parts([0x1F00, 0x5000], 512), Ok(vec![(0x1F00, 256), (0x5000, 256)]));
        // The first list has room for two entries: a page, and the next list.
        let put = |at, value: u64| ram.write(at, &value.to_le_bytes()).unwrap();
        put(0x8FF0, 0x1_0000);
        put(0x8FF8, 0x9000);
        put(0x9000, 0x1_1000);
        put(0x9008, 0x2_0000);
        let expected = vec![(0x3000, 0x1000), (0x1_0000, 0x2000), (0x2_0000, 0x10)];
        assert_eq!(parts([0x3000, 0x8FF0], 3 * PAGE + 0x10), Ok(expected));
        // Two pages need no other list: the last entry is a page.
        put(0x8FF8, 0x3_0000);
        let expected = vec![(0x3000, 0x1000), (0x1_0000, 0x1000), (0x3_0000, 0x1000)];
        assert_eq!(parts([0x3000, 0x8FF0], 3 * PAGE), Ok(expected));
    }

    #[test]
    fn pointers_that_lead_nowhere_are_refused() {
        let ram = Ram::new(1 << 20);
        let refused = |pages, length| Data::find(&ram, pages, length).map(|data| data.parts).unwrap_err();
        assert_eq!(refused([2, 0], 4), Status::INVALID_PAGE_OFFSET);
        assert_eq!(refused([0, 0x800], 2 * PAGE), Status::INVALID_PAGE_OFFSET);
        assert_eq!(refused([0, 0x1004], 3 * PAGE), Status::INVALID_PAGE_OFFSET);
        assert_eq!(refused([0, 0x10_0000], 3 * PAGE), Status::DATA_TRANSFER);
        // A list that leads to itself.
        ram.write(0x1FF8, &0x1FF8_u64.to_le_bytes()).unwrap();
        assert_eq!(refused([0, 0x1FF8], 64 * PAGE), Status::INVALID_FIELD);
        let mut data = Data::find(&ram, [0xF_FF00, 0x10_0000], 0x200).unwrap();
        assert_eq!(data.read(&mut [0; 0x200]), Err(Status::DATA_TRANSFER));
        let mut data = Data::find(&ram, [u64::MAX - 3, 0], 4).unwrap();
        assert_eq!(data.write(&[0; 4]), Err(Status::DATA_TRANSFER));
    }

    proptest! {
        /// Data comes to the pages in their order, in whatever pieces it is copied.
        #[test]
        fn bytes_are_copied_in_order(
            offset in 0_u64..1024,
            length in 1_usize..40_000,
            piece in 1_usize..9_000,
            shuffle in any::<u64>(),
        ) {
            let ram = Ram::new(1 << 20);
            let page = |number: u64| 0x1_0000 + (number.wrapping_mul(7) + shuffle % 16) % 16 * PAGE;
            for number in 1..16 {
                ram.write(0x8000 + 8 * (number - 1), &page(number).to_le_bytes()).unwrap();
            }
            let bytes: Vec<u8> = (0..length).map(|at| (at * 7 % 251) as u8).collect();
            let first = page(0) + offset * 4;
            let in_first = (PAGE - first % PAGE) as usize;
            let rest = length.saturating_sub(in_first);
            let second = if (1..=PAGE as usize).contains(&rest) { page(1) } else { 0x8000 };
            let mut data = Data::find(&ram, [first, second], length as u64).unwrap();
            for piece in bytes.chunks(piece) {
                data.write(piece).unwrap();
            }
            prop_assert_eq!(data.write(&[0]), Err(Status::DATA_TRANSFER));
            let mut data = Data::find(&ram, [first, second], length as u64).unwrap();
            let mut back = vec![0; length];
            data.read(&mut back).unwrap();
            prop_assert_eq!(&back, &bytes);
            let mut at_second = [0; 1];
            if length > in_first {
                ram.read(page(1), &mut at_second).unwrap();
                prop_assert_eq!(at_second[0], bytes[in_first]);
            }
        }
    }
}
