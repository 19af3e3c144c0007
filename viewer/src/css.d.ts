// Style sheets are imported as text (esbuild's loader) and adopted by the shadow root of `App`.
declare module "*.css" { const text: string; export default text; }
