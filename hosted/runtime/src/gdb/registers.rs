//! The processor as gdb knows it: 64-bit registers, and the bases of FS and GS. Floating-point
//! registers are not shown, because kernels keep programs' values there.

use gdbstub::arch::{Arch, Registers};

#[derive(Debug)]
pub enum X86 {}

/// In gdb's order, which is not that of their numbers: RAX, RBX, RCX, RDX, RSI, RDI, RBP, RSP, R8 to R15.
pub const ORDER: [usize; 16] = [0, 3, 1, 2, 6, 7, 5, 4, 8, 9, 10, 11, 12, 13, 14, 15];
/// ST0 to ST7, and eight control registers of 32 bits.
const FLOATING: usize = 8 * 10 + 8 * 4;

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct State {
    /// The general registers, in the order of [`ORDER`].
    pub general: [u64; 16],
    /// Of the next instruction.
    pub rip: u64,
    pub flags: u32,
    /// CS, SS, DS, ES, FS, GS.
    pub segments: [u32; 6],
    /// The bases of FS and GS.
    pub bases: [u64; 2],
}

impl Registers for State {
    type ProgramCounter = u64;

    fn pc(&self) -> u64 {
        self.rip
    }

    fn gdb_serialize(&self, mut write: impl FnMut(Option<u8>)) {
        let mut known = |bytes: &[u8]| bytes.iter().for_each(|byte| write(Some(*byte)));
        self.general.iter().chain([&self.rip]).for_each(|value| known(&value.to_le_bytes()));
        known(&self.flags.to_le_bytes());
        self.segments.iter().for_each(|value| known(&value.to_le_bytes()));
        (0..FLOATING).for_each(|_| write(None));
        self.bases.iter().flat_map(|value| value.to_le_bytes()).for_each(|byte| write(Some(byte)));
    }

    fn gdb_deserialize(&mut self, bytes: &[u8]) -> Result<(), ()> {
        let mut rest = bytes;
        let mut long = || take(&mut rest).map(u64::from_le_bytes);
        for value in &mut self.general {
            *value = long()?;
        }
        self.rip = long()?;
        self.flags = u32::from_le_bytes(take(&mut rest)?);
        for value in &mut self.segments {
            *value = u32::from_le_bytes(take(&mut rest)?);
        }
        take::<FLOATING>(&mut rest)?;
        for value in &mut self.bases {
            *value = u64::from_le_bytes(take(&mut rest)?);
        }
        Ok(())
    }
}

fn take<const N: usize>(rest: &mut &[u8]) -> Result<[u8; N], ()> {
    let (taken, behind) = rest.split_first_chunk::<N>().ok_or(())?;
    *rest = behind;
    Ok(*taken)
}

impl Arch for X86 {
    type Usize = u64;
    type Registers = State;
    type BreakpointKind = usize;
    type RegId = ();

    fn target_description_xml() -> Option<&'static str> {
        Some(DESCRIPTION)
    }
}

/// The description of the registers for gdb.
const DESCRIPTION: &str = r#"<?xml version="1.0"?>
<!DOCTYPE target SYSTEM "gdb-target.dtd">
<target version="1.0">
<architecture>i386:x86-64</architecture>
<feature name="org.gnu.gdb.i386.core">
<reg name="rax" bitsize="64" type="int64"/><reg name="rbx" bitsize="64" type="int64"/>
<reg name="rcx" bitsize="64" type="int64"/><reg name="rdx" bitsize="64" type="int64"/>
<reg name="rsi" bitsize="64" type="int64"/><reg name="rdi" bitsize="64" type="int64"/>
<reg name="rbp" bitsize="64" type="data_ptr"/><reg name="rsp" bitsize="64" type="data_ptr"/>
<reg name="r8" bitsize="64" type="int64"/><reg name="r9" bitsize="64" type="int64"/>
<reg name="r10" bitsize="64" type="int64"/><reg name="r11" bitsize="64" type="int64"/>
<reg name="r12" bitsize="64" type="int64"/><reg name="r13" bitsize="64" type="int64"/>
<reg name="r14" bitsize="64" type="int64"/><reg name="r15" bitsize="64" type="int64"/>
<reg name="rip" bitsize="64" type="code_ptr"/><reg name="eflags" bitsize="32" type="int32"/>
<reg name="cs" bitsize="32" type="int32"/><reg name="ss" bitsize="32" type="int32"/>
<reg name="ds" bitsize="32" type="int32"/><reg name="es" bitsize="32" type="int32"/>
<reg name="fs" bitsize="32" type="int32"/><reg name="gs" bitsize="32" type="int32"/>
<reg name="st0" bitsize="80" type="i387_ext"/><reg name="st1" bitsize="80" type="i387_ext"/>
<reg name="st2" bitsize="80" type="i387_ext"/><reg name="st3" bitsize="80" type="i387_ext"/>
<reg name="st4" bitsize="80" type="i387_ext"/><reg name="st5" bitsize="80" type="i387_ext"/>
<reg name="st6" bitsize="80" type="i387_ext"/><reg name="st7" bitsize="80" type="i387_ext"/>
<reg name="fctrl" bitsize="32" type="int" group="float"/>
<reg name="fstat" bitsize="32" type="int" group="float"/>
<reg name="ftag" bitsize="32" type="int" group="float"/>
<reg name="fiseg" bitsize="32" type="int" group="float"/>
<reg name="fioff" bitsize="32" type="int" group="float"/>
<reg name="foseg" bitsize="32" type="int" group="float"/>
<reg name="fooff" bitsize="32" type="int" group="float"/>
<reg name="fop" bitsize="32" type="int" group="float"/>
</feature>
<feature name="org.gnu.gdb.i386.segments">
<reg name="fs_base" bitsize="64" type="int"/><reg name="gs_base" bitsize="64" type="int"/>
</feature>
</target>"#;

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn registers_come_back_as_they_were_and_those_that_are_not_shown_are_unknown() {
        let state = State {
            general: std::array::from_fn(|at| at as u64 * 0x0101_0101_0101),
            rip: 0x4000_1234,
            flags: 0x246,
            segments: [0x10, 0x18, 0, 0, 0, 1],
            bases: [7, 8],
        };
        let mut bytes = Vec::new();
        state.gdb_serialize(|byte| bytes.push(byte));
        let sizes: usize =
            DESCRIPTION.split("bitsize=\"").skip(1).map(|rest| rest[..2].parse::<usize>().unwrap() / 8).sum();
        assert_eq!((bytes.len(), bytes.iter().filter(|byte| byte.is_none()).count()), (sizes, FLOATING));
        let bytes: Vec<u8> = bytes.into_iter().map(Option::unwrap_or_default).collect();
        let mut back = State::default();
        back.gdb_deserialize(&bytes).unwrap();
        assert_eq!(back, state);
        assert!(back.gdb_deserialize(&bytes[1..]).is_err());
    }
}
