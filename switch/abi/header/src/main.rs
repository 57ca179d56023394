//! Prints the crate mercury-abi as `switch/driver/mercury_abi.h`, for C and for assembler.
//!
//!     cargo run -p mercury-abi-header
//!
//! Names and comments are those of the Rust sources (see `build.rs`); numbers are those of the
//! compiled crate, and the header asserts sizes and offsets again when C compiles it.

use mercury_abi::{
    MERCURY_ABI_VERSION,
    code::{Code, USER_SPACE_CODES},
    facts::*,
    gate::*,
    guest::*,
    ioctl::*,
    restart::*,
    shared::*,
    snapshot::*,
    *,
};
use std::fmt::Write as _;

/// A declaration of the crate.
enum Item {
    Const { doc: &'static str, name: &'static str, value: u64 },
    Enum { doc: &'static str, name: &'static str, variants: &'static [(&'static str, &'static str, u64)] },
    Struct { doc: &'static str, name: &'static str, size: usize, fields: &'static [Field] },
}

/// A field of a structure; `length` 0: no array.
struct Field {
    doc: &'static str,
    name: &'static str,
    element: &'static str,
    length: usize,
    offset: usize,
}

#[allow(clippy::unnecessary_cast, reason = "constants of several widths go through one list")]
const ITEMS: &[Item] = include!(concat!(env!("OUT_DIR"), "/items.rs"));
const PATH: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../driver/mercury_abi.h");

fn main() -> std::io::Result<()> {
    std::fs::write(PATH, render().expect("writing to a string"))
}

fn render() -> Result<String, std::fmt::Error> {
    let mut out = String::from(
        "/* SPDX-License-Identifier: GPL-2.0-only */\n\
         /*\n * The interface between hypervisor, driver and command.\n *\n \
         * Generated from the crate mercury-abi (switch/abi/src). Do not edit:\n \
         *\tcargo run -p mercury-abi-header\n */\n\
         #ifndef MERCURY_ABI_H\n#define MERCURY_ABI_H\n\n#include <linux/const.h>\n\n",
    );
    for item in ITEMS {
        numbers(item, &mut out)?;
    }
    codes(&mut out)?;
    out.push_str("\n/* Offsets in the gate block, for assembler. */\n");
    offsets("GateBlock", "GATE", 0, &mut out)?;
    out.push_str("\n/* Offsets in the structures of a restart, for assembler. */\n");
    offsets("SavedCpu", "SAVED_CPU", 0, &mut out)?;
    offsets("Landing", "LANDING", 0, &mut out)?;
    offsets("LandingList", "LANDING_LIST", 0, &mut out)?;
    out.push_str("\n#ifndef __ASSEMBLY__\n\n#include <linux/build_bug.h>\n#include <linux/stddef.h>\n");
    out.push_str("#include <linux/types.h>\n");
    let mut printed = Vec::new();
    for item in ITEMS {
        structure(item, &mut printed, &mut out)?;
    }
    code_names(&mut out)?;
    out.push_str("\n#endif /* __ASSEMBLY__ */\n\n#endif /* MERCURY_ABI_H */\n");
    Ok(out)
}

/// Prints a constant or an enumeration as macros.
fn numbers(item: &Item, out: &mut String) -> std::fmt::Result {
    match item {
        Item::Const { doc, name, value } => {
            comment("", doc, out)?;
            define(&format!("MERCURY_{name}"), *value, out)
        }
        Item::Enum { doc, name, variants } => {
            out.push('\n');
            comment("", doc, out)?;
            for (_, variant, value) in *variants {
                define(&format!("MERCURY_{}_{}", shout(name), shout(variant)), *value, out)?;
            }
            out.push('\n');
            Ok(())
        }
        Item::Struct { .. } => Ok(()),
    }
}

fn codes(out: &mut String) -> std::fmt::Result {
    out.push_str("\n/* Codes of refusals and departures (`mercury explain`). */\n");
    for code in Code::ALL.iter().filter(|code| (**code as u32) < USER_SPACE_CODES) {
        let name = code.name().replace('-', "_").to_uppercase();
        define(&format!("MERCURY_CODE_{name}"), *code as u64, out)?;
    }
    Ok(())
}

/// Prints a function that returns the name of a code.
fn code_names(out: &mut String) -> std::fmt::Result {
    out.push_str(
        "\n/* Returns the name of a code, which `mercury explain` takes. */\n\
         static inline const char *mercury_code_name(u64 code)\n{\n\tswitch (code) {\n",
    );
    for code in Code::ALL.iter().filter(|code| (**code as u32) < USER_SPACE_CODES) {
        writeln!(out, "\tcase {}:\n\t\treturn \"{}\";", *code as u32, code.name())?;
    }
    out.push_str("\tdefault:\n\t\treturn \"unknown\";\n\t}\n}\n");
    Ok(())
}

/// Prints the offsets of a structure's fields, and of the fields of the structures in it.
fn offsets(structure: &str, prefix: &str, base: usize, out: &mut String) -> std::fmt::Result {
    let Some(fields) = fields_of(structure) else { return Ok(()) };
    for field in fields {
        let name = format!("{prefix}_{}", field.name.to_uppercase());
        define(&format!("MERCURY_{name}"), (base + field.offset) as u64, out)?;
        offsets(field.element, &name, base + field.offset, out)?;
    }
    Ok(())
}

fn fields_of(structure: &str) -> Option<&'static [Field]> {
    ITEMS.iter().find_map(|item| match item {
        Item::Struct { name, fields, .. } if *name == structure => Some(*fields),
        _ => None,
    })
}

/// Prints a structure with its assertions, after the structures that it contains.
fn structure(item: &Item, printed: &mut Vec<&str>, out: &mut String) -> std::fmt::Result {
    let Item::Struct { doc, name, size, fields } = item else { return Ok(()) };
    if printed.contains(name) {
        return Ok(());
    }
    printed.push(name);
    for part in ITEMS {
        if let Item::Struct { name, .. } = part
            && fields.iter().any(|field| field.element == *name)
        {
            structure(part, printed, out)?;
        }
    }
    let tag = format!("mercury_{}", snake(name));
    out.push('\n');
    comment("", doc, out)?;
    writeln!(out, "struct {tag} {{")?;
    for field in *fields {
        comment("\t", field.doc, out)?;
        let suffix = if field.length == 0 { String::new() } else { format!("[{}]", field.length) };
        writeln!(out, "\t{} {}{suffix};", c_type(field.element), field.name)?;
    }
    writeln!(out, "}};\n\nstatic_assert(sizeof(struct {tag}) == {size});")?;
    for field in *fields {
        writeln!(out, "static_assert(offsetof(struct {tag}, {}) == {});", field.name, field.offset)?;
    }
    Ok(())
}

fn c_type(rust: &str) -> String {
    if matches!(rust, "u8" | "u16" | "u32" | "u64") {
        return rust.to_string();
    }
    assert!(fields_of(rust).is_some(), "{rust} has no counterpart in C");
    format!("struct mercury_{}", snake(rust))
}

/// Prints a macro for a number. Large numbers need a suffix in C that assembler does not know.
fn define(name: &str, value: u64, out: &mut String) -> std::fmt::Result {
    match value {
        0..=0xffff => writeln!(out, "#define {name} {value}"),
        0x1_0000..=0x7fff_ffff => writeln!(out, "#define {name} {value:#x}"),
        _ => writeln!(out, "#define {name} _UL({value:#x})"),
    }
}

/// Prints a comment in lines of at most 100 columns.
fn comment(indent: &str, text: &str, out: &mut String) -> std::fmt::Result {
    if text.is_empty() {
        return Ok(());
    }
    let width = 85 - 8 * indent.len();
    let mut lines = vec![String::new()];
    for word in text.split_whitespace() {
        let line = lines.last_mut().expect("never empty");
        if !line.is_empty() && line.len() + word.len() >= width {
            lines.push(word.to_string());
        } else {
            line.push_str(if line.is_empty() { "" } else { " " });
            line.push_str(word);
        }
    }
    if let [line] = lines.as_slice() {
        return writeln!(out, "{indent}/* {line} */");
    }
    writeln!(out, "{indent}/*")?;
    for line in lines {
        writeln!(out, "{indent} * {line}")?;
    }
    writeln!(out, "{indent} */")
}

/// Returns `native_op` for `NativeOp`.
fn snake(name: &str) -> String {
    let mut text = String::new();
    for (position, letter) in name.char_indices() {
        if letter.is_uppercase() && position > 0 {
            text.push('_');
        }
        text.push(letter.to_ascii_lowercase());
    }
    text
}

/// Returns `NATIVE_OP` for `NativeOp`.
fn shout(name: &str) -> String {
    snake(name).to_uppercase()
}

#[cfg(test)]
mod tests {
    #[test]
    fn header_is_up_to_date() {
        let found = std::fs::read_to_string(super::PATH).unwrap_or_default();
        assert!(
            found == super::render().expect("writing to a string"),
            "switch/driver/mercury_abi.h is stale: run `cargo run -p mercury-abi-header`"
        );
    }
}
