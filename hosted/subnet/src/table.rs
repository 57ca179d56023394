//! The places of addresses on a subnet, learned from the senders of frames.

use std::collections::HashMap;

use crate::Address;

/// Largest number of addresses. A machine that sends from more of them makes others forget all.
const LIMIT: usize = 1024;

/// The slot of each address that was seen.
#[derive(Debug, Default)]
pub struct Table(HashMap<Address, usize>);

impl Table {
    /// Notes that an address is in a slot.
    pub fn learn(&mut self, address: Address, slot: usize) {
        if is_group(address) || self.0.get(&address) == Some(&slot) {
            return;
        }
        if self.0.len() >= LIMIT {
            self.0.clear();
        }
        self.0.insert(address, slot);
    }

    /// Returns the slot of an address. `None` for groups and unknown addresses: such a frame is for all.
    #[must_use]
    pub fn find(&self, address: Address) -> Option<usize> {
        self.0.get(&address).copied()
    }

    /// Forgets all addresses.
    pub fn clear(&mut self) {
        self.0.clear();
    }
}

/// Returns true for the address of a group of cards.
#[must_use]
pub fn is_group(address: Address) -> bool {
    address[0] & 1 != 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_place_of_an_address_counts_and_groups_have_none() {
        let mut table = Table::default();
        let one = [2, 0, 0, 0, 0, 1];
        assert_eq!(table.find(one), None);
        table.learn(one, 3);
        table.learn(one, 4);
        table.learn([0xFF; 6], 5);
        assert_eq!((table.find(one), table.find([0xFF; 6])), (Some(4), None));
        for number in 0..5000_u16 {
            let [a, b] = number.to_be_bytes();
            table.learn([2, 1, 0, 0, a, b], 1);
        }
        assert!(table.0.len() <= LIMIT);
    }
}
