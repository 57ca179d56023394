//! The prelude: the text that the assembler reads before each file.
//!
//! Its macros end slots and write records. One macro for each sensitive mnemonic catches
//! instructions that only appear when macros are expanded, for example from arguments. Such a macro
//! is removed while the real instruction is assembled, and defined again after it. The rewriter
//! does the same around instructions of the text itself.

use std::fmt::Write;

use crate::{
    kind::Kind,
    record::{Flags, SECTION, VERSION},
    rewrite::Treatment,
};

/// Text of the macros. Label `77790` is a slot's beginning and `77791` its end. Labels `7777n` and
/// `7778n` are those of its instruction n.
const MACROS: &str = "\
.macro mercury_record number, kind, flags, source, target
.pushsection @SECTION@, \"\", @progbits
.quad 77790b
.byte 77791b - 77790b, 7777\\number\\()b - 77790b, 7778\\number\\()b - 7777\\number\\()b
.byte \\kind, \\flags, \\source, \\target, @VERSION@
.popsection
.endm
.macro mercury_pad least
77792:
.if (77792b - 77790b) < \\least
.if (77792b - 77790b) == \\least - 1
.byte 0x90
.elseif (77792b - 77790b) == \\least - 2
.byte 0x66, 0x90
.elseif (77792b - 77790b) == \\least - 3
.byte 0x0f, 0x1f, 0x00
.elseif (77792b - 77790b) == \\least - 4
.byte 0x0f, 0x1f, 0x40, 0x00
.else
.byte 0x0f, 0x1f, 0x44, 0x00, 0x00
.endif
.endif
.endm
.macro mercury_late least, fill
77792:
.skip -((\\least - (77792b - 77790b)) > 0) * (\\least - (77792b - 77790b)), \\fill
.endm
.macro mercury_mode bits
77790: 77770: 77780: 77791:
mercury_record 0, @MODE@, 0, \\bits, 0
.endm
.macro mercury_bytes kind, least, bytes:vararg
77790: 77770: \\bytes
mercury_close \\kind, \\least, 255
.endm
.macro mercury_alone kind, least, operands, instruction:vararg
77790: 77770: \\instruction
mercury_close \\kind, \\least, \\operands
.endm
.macro mercury_close kind, least, operands
77780:
.if .Lmercury_left == 0
mercury_pad \\least
.endif
77791:
mercury_record 0, \\kind, .Lmercury_alternative*@ALTERNATIVE@+.Lmercury_left*@LEFT@, \\operands, \\operands
.endm
.set .Lmercury_alternative, 0
.set .Lmercury_left, @ALWAYS@
";

/// Returns the prelude of a file.
#[must_use]
pub fn prelude(treatment: Treatment) -> String {
    let always = u8::from(treatment == Treatment::Left);
    let mut text = MACROS
        .replace("@SECTION@", SECTION)
        .replace("@VERSION@", &VERSION.to_string())
        .replace("@MODE@", &(Kind::Mode as u8).to_string())
        .replace("@ALTERNATIVE@", &Flags::ALTERNATIVE.0.to_string())
        .replace("@LEFT@", &Flags::LEFT.0.to_string())
        .replace("@ALWAYS@", &always.to_string());
    for kind in Kind::ALL {
        for name in kind.mnemonics() {
            let (number, least) = (*kind as u8, kind.least_slot());
            let _ = write!(
                text,
                ".macro mercury_catch_{name}\n.macro {name} operands:vararg\n.purgem {name}\n\
                 77790: 77770: {name} \\operands\nmercury_catch_{name}\nmercury_close {number}, {least}, \
                 255\n\
                 .endm\n.endm\nmercury_catch_{name}\n"
            );
        }
    }
    text
}
