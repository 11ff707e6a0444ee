package check

import "reflect"

// Fill sets everything in a value to something that isn't its zero: texts to text.
func Fill(v reflect.Value, text string) {
	switch v.Kind() {
	case reflect.Bool:
		v.SetBool(true)
	case reflect.Int, reflect.Int64:
		v.SetInt(7777)
	case reflect.Uint16, reflect.Uint64:
		v.SetUint(7777)
	case reflect.String:
		v.SetString(text)
	case reflect.Array:
		for i := range v.Len() {
			Fill(v.Index(i), text)
		}
	case reflect.Slice:
		v.Set(reflect.MakeSlice(v.Type(), 1, 1))
		Fill(v.Index(0), text)
	case reflect.Pointer:
		v.Set(reflect.New(v.Type().Elem()))
		Fill(v.Elem(), text)
	case reflect.Map:
		v.Set(reflect.MakeMap(v.Type()))
		key, value := reflect.New(v.Type().Key()).Elem(), reflect.New(v.Type().Elem()).Elem()
		Fill(key, text)
		Fill(value, text)
		v.SetMapIndex(key, value)
	case reflect.Struct:
		for i := range v.NumField() {
			if v.Field(i).CanSet() {
				Fill(v.Field(i), text)
			}
		}
	}
}
