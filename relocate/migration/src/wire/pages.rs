//! Records of pages, as they go over the wire.

use super::packed;

/// Size of a page in bytes.
pub const PAGE: usize = 4096;
/// Largest number of pages in a record.
pub const PAGES_MAX: usize = 256;
const COUNT: usize = 4;
const ENTRY: usize = 8;
/// Largest size of a record before compression, in bytes.
pub const RAW_MAX: usize = COUNT + PAGES_MAX * (ENTRY + PAGE);
/// Largest size of a record on the wire, in bytes.
pub const PACKED_MAX: usize = packed::longest(RAW_MAX);

const DATA: u64 = 1;
const ZERO: u64 = 2;
const SAME: u64 = 3;
const KIND: u64 = PAGE as u64 - 1;

/// The content of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Content<'a> {
    /// The bytes of the page.
    Data(&'a [u8; PAGE]),
    /// A page of all zeros.
    Zero,
}

/// A page of a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Page<'a> {
    /// Physical address of the page.
    pub phys: u64,
    /// Content of the page.
    pub content: Content<'a>,
}

/// Pages that go over the wire together.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Pages {
    entries: Vec<u64>,
    data: Vec<u8>,
}

impl Pages {
    /// Returns true if the record has no room for another page.
    #[must_use]
    pub fn is_full(&self) -> bool {
        self.entries.len() >= PAGES_MAX
    }

    /// Returns the number of pages.
    #[must_use]
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Returns true if the record is empty.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Adds a page. A page of zeros, or like the page before, takes no room.
    ///
    /// # Panics
    /// The record [is full](Self::is_full), or the address is not that of a page.
    pub fn add(&mut self, phys: u64, page: &[u8; PAGE]) {
        assert!(!self.is_full() && phys & KIND == 0, "no room, or no page's address");
        let kind = if page.iter().all(|byte| *byte == 0) {
            ZERO
        } else if self.data.last_chunk() == Some(page)
            && self.entries.last().is_some_and(|last| last & KIND != ZERO)
        {
            SAME
        } else {
            self.data.extend_from_slice(page);
            DATA
        };
        self.entries.push(phys | kind);
    }

    /// Returns the pages, in their order.
    pub fn iter(&self) -> impl Iterator<Item = Page<'_>> {
        let (pages, _) = self.data.as_chunks::<PAGE>();
        let mut rest = pages.iter();
        let mut last = Content::Zero;
        self.entries.iter().map(move |entry| {
            last = match entry & KIND {
                ZERO => Content::Zero,
                // Each such entry has a page of data, or the record would have been refused.
                DATA => rest.next().map_or(Content::Zero, Content::Data),
                _ => last,
            };
            Page { phys: entry & !KIND, content: last }
        })
    }

    /// Returns the record as it goes over the wire.
    ///
    /// # Errors
    /// zstd fails.
    pub fn pack(&self, level: i32) -> std::io::Result<Vec<u8>> {
        let mut raw = Vec::with_capacity(COUNT + self.entries.len() * ENTRY + self.data.len());
        raw.extend_from_slice(&(self.entries.len() as u32).to_le_bytes());
        self.entries.iter().for_each(|entry| raw.extend_from_slice(&entry.to_le_bytes()));
        raw.extend_from_slice(&self.data);
        packed::pack(&raw, level)
    }

    /// Parses a record that came over the wire. Its checksum is right; the record may be hostile
    /// all the same.
    pub(super) fn unpack(payload: &[u8]) -> Result<Self, &'static str> {
        let raw = packed::unpack(payload, RAW_MAX, "it is longer than pages can be")?;
        let (count, rest) = raw.split_first_chunk().ok_or("it is too short")?;
        let count = u32::from_le_bytes(*count) as usize;
        if count == 0 || count > PAGES_MAX || rest.len() < count * ENTRY {
            return Err("its number of entries is impossible");
        }
        let (entries, data) = rest.split_at(count * ENTRY);
        let (entries, _) = entries.as_chunks::<ENTRY>();
        let entries: Vec<_> = entries.iter().map(|entry| u64::from_le_bytes(*entry)).collect();
        if !entries.iter().all(|entry| matches!(entry & KIND, DATA | ZERO | SAME))
            || entries[0] & KIND == SAME
        {
            return Err("one of its entries is invalid");
        }
        if data.len() != entries.iter().filter(|entry| *entry & KIND == DATA).count() * PAGE {
            return Err("its data do not match its entries");
        }
        Ok(Self { entries, data: data.to_vec() })
    }
}
