//! The places of a command's data in the guest's memory: pages, in the command or in lists (PRP).

use super::command::Status;
use crate::{
    Memory,
    parts::{Lost, Parts},
};

/// Size of a page of the guest's, the only one that the controller has.
pub const PAGE: u64 = 4096;

impl From<Lost> for Status {
    fn from(_: Lost) -> Self {
        Self::DATA_TRANSFER
    }
}

/// Finds data of this length.
///
/// # Errors
/// A pointer leads nowhere, or has an offset that it may not have.
pub fn find<M: Memory + ?Sized>(memory: &M, pages: [u64; 2], length: u64) -> Result<Parts<'_, M>, Status> {
    let mut data = Parts::new(memory);
    let [first, second] = pages;
    if !first.is_multiple_of(4) {
        return Err(Status::INVALID_PAGE_OFFSET);
    }
    let rest = length - data.add(first, (PAGE - first % PAGE).min(length));
    match rest {
        0 => {}
        1..=PAGE => {
            add_page(&mut data, second, rest)?;
        }
        _ => follow(&mut data, memory, second, rest)?,
    }
    Ok(data)
}

fn add_page<M: Memory + ?Sized>(data: &mut Parts<'_, M>, start: u64, rest: u64) -> Result<u64, Status> {
    if !start.is_multiple_of(PAGE) {
        return Err(Status::INVALID_PAGE_OFFSET);
    }
    Ok(data.add(start, rest.min(PAGE)))
}

/// Adds the pages of a list. Its last entry leads to another list if there are more pages.
fn follow<M: Memory + ?Sized>(
    data: &mut Parts<'_, M>,
    memory: &M,
    mut list: u64,
    mut rest: u64,
) -> Result<(), Status> {
    while rest > 0 {
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
        memory.read(list, &mut bytes).ok_or(Status::DATA_TRANSFER)?;
        let entries = bytes.as_chunks::<8>().0.iter().map(|bytes| u64::from_le_bytes(*bytes));
        for (entry, number) in entries.zip(1..) {
            if number == room && rest > PAGE {
                list = entry;
            } else {
                rest -= add_page(data, entry, rest)?;
            }
        }
    }
    Ok(())
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
        let parts = |pages, length| find(&ram, pages, length).map(Parts::into_list);
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
        let refused = |pages, length| find(&ram, pages, length).map(Parts::into_list).unwrap_err();
        assert_eq!(refused([2, 0], 4), Status::INVALID_PAGE_OFFSET);
        assert_eq!(refused([0, 0x800], 2 * PAGE), Status::INVALID_PAGE_OFFSET);
        assert_eq!(refused([0, 0x1004], 3 * PAGE), Status::INVALID_PAGE_OFFSET);
        assert_eq!(refused([0, 0x10_0000], 3 * PAGE), Status::DATA_TRANSFER);
        // A list that leads to itself.
        ram.write(0x1FF8, &0x1FF8_u64.to_le_bytes()).unwrap();
        assert_eq!(refused([0, 0x1FF8], 64 * PAGE), Status::INVALID_FIELD);
        let mut data = find(&ram, [0xF_FF00, 0x10_0000], 0x200).unwrap();
        assert_eq!(data.read(&mut [0; 0x200]), Err(Lost::NoMemory));
        let mut data = find(&ram, [u64::MAX - 3, 0], 4).unwrap();
        assert_eq!(data.write(&[0; 4]), Err(Lost::NoMemory));
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
            let mut data = find(&ram, [first, second], length as u64).unwrap();
            for piece in bytes.chunks(piece) {
                data.write(piece).unwrap();
            }
            prop_assert_eq!(data.write(&[0]), Err(Lost::NoMore));
            let mut data = find(&ram, [first, second], length as u64).unwrap();
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
