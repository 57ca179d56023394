//! The kinds of virtualization-sensitive instructions. They are the privileged instructions, and
//! those that a process may execute but that read or change the processor's state instead of its
//! kernel's.
//!
//! Some instructions are left out on purpose. A process executes them with the meaning that they
//! have in a kernel, or they are traps that reach a monitor by themselves: RDTSC and RDTSCP (time
//! comes from a clock source), RDPID, INT, INT3, UD2.

use iced_x86::{Code, Instruction, Mnemonic, OpKind, Register};

macro_rules! kinds {
    ($(
        $(#[$doc:meta])*
        $kind:ident = $number:literal, $name:literal, [$($gas:literal)*], [$($iced:ident)*];
    )*) => {
        /// The kind of a sensitive instruction. The numbers are those of the record's section and
        /// never change.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[repr(u8)]
        pub enum Kind {
            $($(#[$doc])* $kind = $number,)*
        }

        impl Kind {
            /// All kinds, in the order of their numbers.
            pub const ALL: &[Self] = &[$(Self::$kind,)*];

            /// Returns the name in reports.
            #[must_use]
            pub fn name(self) -> &'static str {
                match self { $(Self::$kind => $name,)* }
            }

            /// Returns the spellings of the kind in assembler sources. Moves have other rules: see
            /// [`crate::operand`].
            #[must_use]
            pub fn mnemonics(self) -> &'static [&'static str] {
                match self { $(Self::$kind => &[$($gas,)*],)* }
            }

            fn of_mnemonic(mnemonic: Mnemonic) -> Option<Self> {
                match mnemonic {
                    $($(Mnemonic::$iced => Some(Self::$kind),)*)*
                    _ => None,
                }
            }
        }
    };
}

kinds! {
    /// Disables interrupts.
    Cli = 1, "cli", ["cli"], [Cli];
    /// Enables interrupts.
    Sti = 2, "sti", ["sti"], [Sti];
    /// Waits for an interrupt.
    Hlt = 3, "hlt", ["hlt"], [Hlt];
    /// Pushes the flags, with the interrupt flag.
    Pushf = 4, "pushf", ["pushf" "pushfq" "pushfl" "pushfw"], [Pushf Pushfd Pushfq];
    /// Pops the flags, with the interrupt flag.
    Popf = 5, "popf", ["popf" "popfq" "popfl" "popfw"], [Popf Popfd Popfq];
    /// Returns from an interrupt.
    Iret = 6, "iret", ["iret" "iretq" "iretl" "iretd" "iretw"], [Iret Iretd Iretq];
    /// Returns to another segment.
    FarReturn = 7, "lret", ["lret" "lretq" "lretl" "lretw" "retf" "retfq"], [Retf];
    /// Jumps to another segment.
    FarJump = 8, "ljmp", ["ljmp" "ljmpl" "ljmpq" "ljmpw"], [];
    /// Calls another segment.
    FarCall = 9, "lcall", ["lcall" "lcalll" "lcallq" "lcallw"], [];
    /// Loads the global descriptor table's register.
    Lgdt = 10, "lgdt", ["lgdt" "lgdtl" "lgdtq" "lgdtw"], [Lgdt];
    /// Loads the interrupt descriptor table's register.
    Lidt = 11, "lidt", ["lidt" "lidtl" "lidtq" "lidtw"], [Lidt];
    /// Stores the global descriptor table's register.
    Sgdt = 12, "sgdt", ["sgdt" "sgdtl" "sgdtq" "sgdtw"], [Sgdt];
    /// Stores the interrupt descriptor table's register.
    Sidt = 13, "sidt", ["sidt" "sidtl" "sidtq" "sidtw"], [Sidt];
    /// Loads the local descriptor table's register.
    Lldt = 14, "lldt", ["lldt" "lldtw"], [Lldt];
    /// Stores the local descriptor table's register.
    Sldt = 15, "sldt", ["sldt" "sldtl" "sldtq" "sldtw"], [Sldt];
    /// Loads the task register.
    Ltr = 16, "ltr", ["ltr" "ltrw"], [Ltr];
    /// Stores the task register.
    Str = 17, "str", ["str" "strl" "strq" "strw"], [Str];
    /// Reads the low half of CR0.
    Smsw = 18, "smsw", ["smsw" "smswl" "smswq" "smsww"], [Smsw];
    /// Writes the low four bits of CR0.
    Lmsw = 19, "lmsw", ["lmsw" "lmsww"], [Lmsw];
    /// Clears CR0.TS (task switched).
    Clts = 20, "clts", ["clts"], [Clts];
    /// Drops the caches without writing them back.
    Invd = 21, "invd", ["invd"], [Invd];
    /// Writes the caches back.
    Wbinvd = 22, "wbinvd", ["wbinvd" "wbnoinvd"], [Wbinvd Wbnoinvd];
    /// Invalidates the translation of one page.
    Invlpg = 23, "invlpg", ["invlpg"], [Invlpg];
    /// Invalidates translations of an address space, or of other processors.
    Invpcid = 24, "invpcid", ["invpcid" "invlpga" "invlpgb" "tlbsync"], [Invpcid Invlpga Invlpgb Tlbsync];
    /// Reads a model-specific register.
    Rdmsr = 25, "rdmsr", ["rdmsr" "rdmsrlist"], [Rdmsr Rdmsrlist];
    /// Writes a model-specific register.
    Wrmsr = 26, "wrmsr", ["wrmsr" "wrmsrns" "wrmsrlist"], [Wrmsr Wrmsrns Wrmsrlist];
    /// Reads a performance counter.
    Rdpmc = 27, "rdpmc", ["rdpmc"], [Rdpmc];
    /// Exchanges the two bases of GS.
    Swapgs = 28, "swapgs", ["swapgs"], [Swapgs];
    /// Reads the processor's description.
    Cpuid = 29, "cpuid", ["cpuid"], [Cpuid];
    /// Forbids access to user memory.
    Clac = 30, "clac", ["clac"], [Clac];
    /// Allows access to user memory.
    Stac = 31, "stac", ["stac"], [Stac];
    /// Writes an extended control register.
    Xsetbv = 32, "xsetbv", ["xsetbv"], [Xsetbv];
    /// Reads an extended control register.
    Xgetbv = 33, "xgetbv", ["xgetbv"], [Xgetbv];
    /// Watches a cache line for writes.
    Monitor = 34, "monitor", ["monitor" "monitorx"], [Monitor Monitorx];
    /// Waits for a write to the watched line.
    Mwait = 35, "mwait", ["mwait" "mwaitx"], [Mwait Mwaitx];
    /// Tests a descriptor. The kernel executes VERW to clear the processor's buffers.
    Verify = 36, "verify", ["verr" "verw"], [Verr Verw];
    /// Reads a descriptor's access rights.
    Lar = 37, "lar", ["lar" "larl" "larq" "larw"], [Lar];
    /// Reads a descriptor's limit.
    Lsl = 38, "lsl", ["lsl" "lsll" "lslq" "lslw"], [Lsl];
    /// Reads the base of FS or GS.
    ReadBase = 39, "rdbase",
        ["rdfsbase" "rdfsbasel" "rdfsbaseq" "rdgsbase" "rdgsbasel" "rdgsbaseq"],
        [Rdfsbase Rdgsbase];
    /// Writes the base of FS or GS.
    WriteBase = 40, "wrbase",
        ["wrfsbase" "wrfsbasel" "wrfsbaseq" "wrgsbase" "wrgsbasel" "wrgsbaseq"],
        [Wrfsbase Wrgsbase];
    /// Saves supervisor state.
    Xsaves = 41, "xsaves", ["xsaves" "xsaves64"], [Xsaves Xsaves64];
    /// Restores supervisor state.
    Xrstors = 42, "xrstors", ["xrstors" "xrstors64"], [Xrstors Xrstors64];
    /// Reads the rights of protection keys.
    Rdpkru = 43, "rdpkru", ["rdpkru"], [Rdpkru];
    /// Writes the rights of protection keys.
    Wrpkru = 44, "wrpkru", ["wrpkru"], [Wrpkru];
    /// Reads a control register.
    ReadControl = 45, "mov-from-cr", [], [];
    /// Writes a control register.
    WriteControl = 46, "mov-to-cr", [], [];
    /// Reads a debug register.
    ReadDebug = 47, "mov-from-dr", [], [];
    /// Writes a debug register.
    WriteDebug = 48, "mov-to-dr", [], [];
    /// Loads a segment register.
    LoadSegment = 49, "mov-to-seg",
        ["lfs" "lfsl" "lfsq" "lgs" "lgsl" "lgsq" "lss" "lssl" "lssq"],
        [Lfs Lgs Lss];
    /// Stores a segment register.
    StoreSegment = 50, "mov-from-seg", [], [];
    /// Reads from an I/O port.
    In = 51, "in", ["in" "inb" "inw" "inl"], [In];
    /// Writes to an I/O port.
    Out = 52, "out", ["out" "outb" "outw" "outl"], [Out];
    /// Reads a string from an I/O port.
    Ins = 53, "ins", ["ins" "insb" "insw" "insl"], [Insb Insw Insd];
    /// Writes a string to an I/O port.
    Outs = 54, "outs", ["outs" "outsb" "outsw" "outsl"], [Outsb Outsw Outsd];
    /// Returns to a program from SYSCALL.
    Sysret = 55, "sysret", ["sysret" "sysretq" "sysretl"], [Sysret Sysretq];
    /// Returns to a program from SYSENTER.
    Sysexit = 56, "sysexit", ["sysexit" "sysexitq" "sysexitl"], [Sysexit Sysexitq];
    /// Calls a hypervisor.
    Hypercall = 57, "hypercall", ["vmcall" "vmmcall" "tdcall" "vmgexit"], [Vmcall Vmmcall Tdcall Vmgexit];
    /// Controls hardware virtualization.
    Virtualize = 58, "virtualize",
        ["vmxon" "vmxoff" "vmclear" "vmptrld" "vmptrst" "vmlaunch" "vmresume" "vmread" "vmreadq" "vmwrite"
         "vmwriteq" "vmfunc" "invept" "invvpid" "vmrun" "vmload" "vmsave" "stgi" "clgi" "skinit" "seamcall"
         "pvalidate" "psmash" "rmpadjust" "rmpupdate" "rmpquery"],
        [Vmxon Vmxoff Vmclear Vmptrld Vmptrst Vmlaunch Vmresume Vmread Vmwrite Vmfunc Invept Invvpid Vmrun
         Vmload Vmsave Stgi Clgi Skinit Seamcall Pvalidate Psmash Rmpadjust Rmpupdate Rmpquery];
    /// Controls enclaves or the platform's configuration.
    Enclave = 59, "enclave", ["encls" "enclv" "pconfig" "hreset"], [Encls Enclv Pconfig Hreset];
    /// Controls shadow stacks of user space or of the kernel.
    ShadowStack = 60, "shadow-stack",
        ["wrussd" "wrussq" "wrssd" "wrssq" "setssbsy" "clrssbsy" "saveprevssp" "rstorssp"],
        [Wrussd Wrussq Wrssd Wrssq Setssbsy Clrssbsy Saveprevssp Rstorssp];
    /// Returns by FRED, or loads the kernel's GS.
    Fred = 61, "fred", ["eretu" "erets" "lkgs"], [Eretu Erets Lkgs];
    /// No instruction: from here on the processor is in the 32-bit, 16-bit or 64-bit mode of the
    /// record.
    Mode = 127, "mode", [], [];
}

/// Length in bytes of the jump by which a monitor leaves a slot for its own code.
pub const JUMP: u8 = 5;

impl Kind {
    /// Returns the kind with this number.
    #[must_use]
    pub fn from_number(number: u8) -> Option<Self> {
        Self::ALL.iter().copied().find(|kind| *kind as u8 == number)
    }

    /// Returns the least length of a slot in bytes. A monitor hides the feature of STAC and CLAC
    /// from its guest and replaces both by nothing, so their slots may be as short as they are.
    #[must_use]
    pub fn least_slot(self) -> u8 {
        match self {
            Self::Clac | Self::Stac => 3,
            Self::Mode => 0,
            _ => JUMP,
        }
    }

    /// Returns true if execution does not continue after the instruction.
    #[must_use]
    pub fn ends_flow(self) -> bool {
        use Kind::{FarJump, FarReturn, Fred, Iret, Sysexit, Sysret};
        matches!(self, Iret | FarReturn | FarJump | Sysret | Sysexit | Fred)
    }

    /// Returns true if the processor takes no interrupt before the next instruction has been
    /// executed too.
    #[must_use]
    pub fn shadows(self) -> bool {
        matches!(self, Self::Sti | Self::LoadSegment)
    }

    /// Returns the kind of a decoded instruction, if it is sensitive.
    #[must_use]
    pub fn of(instruction: &Instruction) -> Option<Self> {
        match instruction.mnemonic() {
            Mnemonic::Mov => Self::of_mov(instruction),
            Mnemonic::Push if instruction.op0_register().is_segment_register() => Some(Self::StoreSegment),
            Mnemonic::Pop if instruction.op0_register().is_segment_register() => Some(Self::LoadSegment),
            Mnemonic::Jmp if is_far(instruction) => Some(Self::FarJump),
            Mnemonic::Call if is_far(instruction) => Some(Self::FarCall),
            mnemonic => Self::of_mnemonic(mnemonic),
        }
    }

    fn of_mov(instruction: &Instruction) -> Option<Self> {
        let register = |operand| match instruction.op_kind(operand) {
            OpKind::Register => instruction.op_register(operand),
            _ => Register::None,
        };
        let (to, from) = (register(0), register(1));
        match () {
            () if to.is_cr() => Some(Self::WriteControl),
            () if from.is_cr() => Some(Self::ReadControl),
            () if to.is_dr() => Some(Self::WriteDebug),
            () if from.is_dr() => Some(Self::ReadDebug),
            () if to.is_segment_register() => Some(Self::LoadSegment),
            () if from.is_segment_register() => Some(Self::StoreSegment),
            () => None,
        }
    }
}

fn is_far(instruction: &Instruction) -> bool {
    matches!(
        instruction.code(),
        Code::Jmp_m1616
            | Code::Jmp_m1632
            | Code::Jmp_m1664
            | Code::Jmp_ptr1616
            | Code::Jmp_ptr1632
            | Code::Call_m1616
            | Code::Call_m1632
            | Code::Call_m1664
            | Code::Call_ptr1616
            | Code::Call_ptr1632
    )
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use iced_x86::{Decoder, DecoderOptions};
    use std::collections::BTreeSet;

    fn kind(bytes: &[u8]) -> Option<Kind> {
        Kind::of(&Decoder::with_ip(64, bytes, 0, DecoderOptions::NONE).decode())
    }

    #[test]
    fn numbers_and_spellings_are_unique() {
        let numbers: BTreeSet<u8> = Kind::ALL.iter().map(|kind| *kind as u8).collect();
        assert_eq!(numbers.len(), Kind::ALL.len());
        let spellings: Vec<&str> = Kind::ALL.iter().flat_map(|kind| kind.mnemonics()).copied().collect();
        assert_eq!(spellings.iter().collect::<BTreeSet<_>>().len(), spellings.len());
        assert!(Kind::ALL.iter().all(|kind| Kind::from_number(*kind as u8) == Some(*kind)));
    }

    #[test]
    fn bytes_have_their_kinds() {
        for (bytes, expected) in [
            (&[0xFA][..], Some(Kind::Cli)),
            (&[0x0F, 0x01, 0xCA], Some(Kind::Clac)),
            (&[0x0F, 0x22, 0xD8], Some(Kind::WriteControl)),
            (&[0x0F, 0x21, 0xF8], Some(Kind::ReadDebug)),
            (&[0x8E, 0xD8], Some(Kind::LoadSegment)),
            (&[0x0F, 0xA0], Some(Kind::StoreSegment)),
            (&[0x0F, 0xA1], Some(Kind::LoadSegment)),
            (&[0x48, 0xCF], Some(Kind::Iret)),
            (&[0x48, 0xFF, 0x28], Some(Kind::FarJump)),
            (&[0x0F, 0x00, 0x2C, 0x25, 0, 0, 0, 0], Some(Kind::Verify)),
            (&[0xF3, 0x6F], Some(Kind::Outs)),
            (&[0xFF, 0x20], None),
            (&[0x0F, 0x31], None),
            (&[0x48, 0x89, 0xC8], None),
        ] {
            assert_eq!(kind(bytes), expected, "{bytes:x?}");
        }
    }
}
