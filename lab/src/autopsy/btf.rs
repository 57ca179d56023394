//! The layouts of a kernel's structures, from the description that it has in its own memory (BTF,
//! Documentation/bpf/btf.rst).

use std::collections::HashMap;

use super::dump::{bytes_at, u16_at, u32_at};

const MAGIC: u16 = 0xeb9f;
const INT: u32 = 1;
const ARRAY: u32 = 3;
const STRUCT: u32 = 4;
const UNION: u32 = 5;
const TYPEDEF: u32 = 8;
const VOLATILE: u32 = 9;
const CONST: u32 = 10;

/// Bytes after a type of this kind, of which some have a part for each of `count` members.
fn rest(kind: u32, count: u64) -> u64 {
    match kind {
        INT | 14 | 17 => 4,
        ARRAY => 12,
        STRUCT | UNION | 15 | 19 => 12 * count,
        6 | 13 => 8 * count,
        _ => 0,
    }
}

/// A kernel's types.
#[derive(Debug)]
pub struct Types<'a> {
    data: &'a [u8],
    strings: u64,
    /// The place of each type, by its number; 0 has none.
    places: Vec<u64>,
    /// The places of structures, by their names.
    structures: HashMap<&'a [u8], u64>,
}

impl<'a> Types<'a> {
    pub fn parse(data: &'a [u8]) -> Option<Self> {
        if u16_at(data, 0)? != MAGIC {
            return None;
        }
        let header = u64::from(u32_at(data, 4)?);
        let [types, length, strings] = [8, 12, 16].map(|at| u32_at(data, at).map(u64::from));
        let (mut at, strings) = (header + types?, header + strings?);
        let end = at + length?;
        let mut places = vec![0];
        while at < end {
            places.push(at);
            let info = u32_at(data, at + 4)?;
            at += 12 + rest(info >> 24 & 31, u64::from(info & 0xffff));
        }
        let mut types = Self { data, strings, places, structures: HashMap::new() };
        let structures = types.places.iter().skip(1).filter(|at| types.kind(**at) == Some(STRUCT));
        types.structures = structures.filter_map(|at| Some((types.name(u32_at(data, *at)?)?, *at))).collect();
        Some(types)
    }

    fn kind(&self, at: u64) -> Option<u32> {
        Some(u32_at(self.data, at + 4)? >> 24 & 31)
    }

    fn name(&self, offset: u32) -> Option<&'a [u8]> {
        let from = self.data.get(usize::try_from(self.strings + u64::from(offset)).ok()?..)?;
        Some(&from[..memchr::memchr(0, from)?])
    }

    /// Returns a structure's size, in bytes.
    pub fn size(&self, name: &str) -> Option<u64> {
        u32_at(self.data, self.structures.get(name.as_bytes())? + 8).map(u64::from)
    }

    /// Returns the offset of a member, in bytes. `path` has the structure's name first, and may lead through
    /// structures in it.
    pub fn offset(&self, path: &[&str]) -> Option<u64> {
        let (first, members) = path.split_first()?;
        let mut at = *self.structures.get(first.as_bytes())?;
        let mut offset = 0;
        for member in members {
            let (bits, kind) = self.member(at, member)?;
            offset += bits / 8;
            at = kind;
        }
        Some(offset)
    }

    /// Returns the offset of a member, in bits, and the place of its type. Members without a name are looked
    /// into.
    fn member(&self, at: u64, wanted: &str) -> Option<(u64, u64)> {
        let info = u32_at(self.data, at + 4)?;
        (0..u64::from(info & 0xffff)).find_map(|number| {
            let member = at + 12 + 12 * number;
            let bits = u32_at(self.data, member + 8)?;
            let bits = u64::from(if info >> 31 == 1 { bits & 0xff_ffff } else { bits });
            let kind = self.resolve(u32_at(self.data, member + 4)?)?;
            let name = self.name(u32_at(self.data, member)?)?;
            if name == wanted.as_bytes() {
                return Some((bits, kind));
            }
            let is_looked_into = name.is_empty() && matches!(self.kind(kind), Some(STRUCT | UNION));
            let (inner, kind) = is_looked_into.then(|| self.member(kind, wanted))??;
            Some((bits + inner, kind))
        })
    }

    /// Returns the place of a type, without its names and attributes; of an array's, that of an element.
    fn resolve(&self, number: u32) -> Option<u64> {
        let mut number = number;
        loop {
            let at = *self.places.get(number as usize)?;
            number = match self.kind(at) {
                Some(TYPEDEF | VOLATILE | CONST) => u32_at(self.data, at + 8)?,
                Some(ARRAY) => u32_at(self.data, at + 12)?,
                _ => return Some(at),
            };
        }
    }
}

/// Returns the description between two places.
pub fn between(memory: &[u8], start: u64, end: u64) -> Option<Types<'_>> {
    Types::parse(bytes_at(memory, start, usize::try_from(end.checked_sub(start)?).ok()?)?)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn members_are_found_in_members() {
        let strings = b"\0int\0inner\0x\0y\0outer\0first\0name_t\0";
        let name = |text: &[u8]| u32::try_from(memchr::memmem::find(strings, text).unwrap()).unwrap();
        let words: Vec<u32> = [
            // 1: int
            vec![name(b"int"), INT << 24, 4, 32],
            // 2: struct inner { int x; int y; }
            vec![name(b"inner"), STRUCT << 24 | 2, 8, name(b"x"), 1, 0, name(b"y"), 1, 32],
            // 3: typedef struct inner name_t
            vec![name(b"name_t"), TYPEDEF << 24, 2],
            // 4: union { name_t first; }, without a name
            vec![0, UNION << 24 | 1, 8, name(b"first"), 3, 0],
            // 5: name_t[3]
            vec![0, ARRAY << 24, 0, 3, 1, 3],
            // 6: struct outer { int x; union; name_t y[3]; }
            vec![name(b"outer"), STRUCT << 24 | 3, 40, name(b"x"), 1, 0, 0, 4, 64, name(b"y"), 5, 128],
        ]
        .concat();
        let length = u32::try_from(words.len() * 4).unwrap();
        let header = [24, 0, length, length, u32::try_from(strings.len()).unwrap()];
        let mut data = vec![0x9f, 0xeb, 1, 0];
        header.iter().chain(&words).for_each(|word| data.extend(word.to_le_bytes()));
        data.extend(strings);
        let types = Types::parse(&data).unwrap();
        assert_eq!(types.offset(&["inner", "y"]), Some(4));
        assert_eq!(types.offset(&["outer", "first", "y"]), Some(12));
        assert_eq!(types.offset(&["outer", "y", "y"]), Some(20));
        assert_eq!(types.offset(&["outer", "z"]), None);
        assert_eq!((types.size("outer"), types.size("int")), (Some(40), None));
        assert!(Types::parse(&data[1..]).is_none());
    }
}
