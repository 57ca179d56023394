//! Reads the sources of mercury-abi and writes a list of their declarations as Rust code. Names and comments
//! come from the source text; every number (value, size, offset, length) comes from the compiled crate.
//! `src/main.rs` includes the list and prints it as C.

use quote::ToTokens;
use std::{env, fmt::Write as _, fs, path::Path};
use syn::{Attribute, Fields, Item, ItemEnum, ItemStruct, Type, Visibility};

/// The modules of mercury-abi in the order in which C needs them. `code` is printed from `Code::ALL`.
const MODULES: [&str; 8] = ["lib", "facts", "shared", "gate", "snapshot", "restart", "guest", "ioctl"];

fn main() {
    let source = Path::new(&env::var("CARGO_MANIFEST_DIR").expect("cargo sets it")).join("../src");
    println!("cargo::rerun-if-changed={}", source.display());
    let mut list = String::from("&[\n");
    for module in MODULES {
        let path = source.join(format!("{module}.rs"));
        let text = fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        let file = syn::parse_file(&text).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        for item in &file.items {
            describe(item, "", "", &mut list);
        }
    }
    list.push_str("]\n");
    let out = Path::new(&env::var("OUT_DIR").expect("cargo sets it")).join("items.rs");
    fs::write(&out, list).unwrap_or_else(|e| panic!("{}: {e}", out.display()));
}

/// Adds one item to the list. `path` leads to it in Rust ("readable::"), `prefix` in C ("READABLE_").
fn describe(item: &Item, path: &str, prefix: &str, list: &mut String) {
    match item {
        Item::Const(item) if matches!(item.vis, Visibility::Public(_)) => {
            let name = item.ident.to_string();
            let c_name = format!("{prefix}{}", name.strip_prefix("MERCURY_").unwrap_or(&name));
            writeln!(
                list,
                "Item::Const {{ doc: {:?}, name: {c_name:?}, value: {path}{name} as u64 }},",
                doc(&item.attrs)
            )
            .expect("a string");
        }
        Item::Mod(item) => {
            let path = format!("{path}{}::", item.ident);
            let prefix = format!("{prefix}{}_", item.ident.to_string().to_uppercase());
            for item in item.content.iter().flat_map(|(_, items)| items) {
                describe(item, &path, &prefix, list);
            }
        }
        Item::Enum(item) => describe_enum(item, list),
        Item::Struct(item) => describe_struct(item, list),
        _ => {}
    }
}

fn describe_enum(item: &ItemEnum, list: &mut String) {
    let name = &item.ident;
    write!(list, "Item::Enum {{ doc: {:?}, name: {:?}, variants: &[", doc(&item.attrs), name.to_string())
        .expect("a string");
    for variant in &item.variants {
        let ident = &variant.ident;
        write!(list, "({:?}, {:?}, {name}::{ident} as u64),", doc(&variant.attrs), ident.to_string())
            .expect("a string");
    }
    list.push_str("] },\n");
}

fn describe_struct(item: &ItemStruct, list: &mut String) {
    let name = &item.ident;
    write!(
        list,
        "Item::Struct {{ doc: {:?}, name: {:?}, size: size_of::<{name}>(), fields: &[",
        doc(&item.attrs),
        name.to_string()
    )
    .expect("a string");
    let Fields::Named(fields) = &item.fields else { panic!("{name} has unnamed fields") };
    for field in &fields.named {
        let ident = field.ident.as_ref().expect("a named field");
        let (element, length) = element(&field.ty);
        write!(
            list,
            "Field {{ doc: {:?}, name: {:?}, element: {element:?}, length: {length}, \
             offset: core::mem::offset_of!({name}, {ident}) }},",
            doc(&field.attrs),
            ident.to_string()
        )
        .expect("a string");
    }
    list.push_str("] },\n");
}

/// Returns the element type of a field and the number of elements; 0 elements: no array.
fn element(field: &Type) -> (String, String) {
    match field {
        Type::Array(array) => {
            let (element, inner) = element(&array.elem);
            assert_eq!(inner, "0", "arrays of arrays are not supported");
            (element, array.len.to_token_stream().to_string())
        }
        Type::Path(path) => {
            let name = path.path.segments.last().expect("a path has a last segment").ident.to_string();
            if name == "Registers" { ("u64".into(), "16".into()) } else { (name, "0".into()) }
        }
        other => panic!("a field of type {} cannot cross into C", other.to_token_stream()),
    }
}

/// Returns the documentation of an item in one line, without the links.
fn doc(attributes: &[Attribute]) -> String {
    let mut text = String::new();
    for attribute in attributes.iter().filter(|a| a.path().is_ident("doc")) {
        if let syn::Meta::NameValue(value) = &attribute.meta
            && let syn::Expr::Lit(literal) = &value.value
            && let syn::Lit::Str(line) = &literal.lit
        {
            text.push_str(&line.value());
        }
    }
    text.replace("[`", "").replace("`]", "").replace('`', "").trim().to_string()
}
